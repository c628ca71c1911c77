"""One rank's part of the model: a stage's layers, and this rank's shards of them.

The model comes from `transformers`: built on the meta device, cut to the stage, sharded by the model's own
tensor-parallel plan, and then filled with this rank's slices of the safetensors files; nothing else is read.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from headwater.errors import UnsupportedModel
from kv_transfer.geometry import Span
from prefill_node import attention
from prefill_node.kv_pool import KvPool, PlacedChunk
from prefill_node.step_cache import StepCache


class _Absent(nn.Module):
    """Stands where a layer of another stage would be, and passes hidden states on."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden


class Stage:
    """The layers [layers.start, layers.end) of a causal language model.

    Args:
        folder: Hugging Face folder with safetensors.
        layers: of the whole model's `num_layers`.
        dtype: of weights and activations.
        tensor_mesh: one-dimensional mesh of the stage's tensor ranks; None for one rank.
        max_context_tokens: replaces max_position_embeddings; 0 keeps it.

    Raises:
        UnsupportedModel: the architecture cannot be cut, sharded or loaded this way.
    """

    def __init__(
        self,
        folder: Path,
        *,
        layers: Span,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        tensor_mesh: DeviceMesh | None,
        max_context_tokens: int = 0,
    ) -> None:
        self.layers = layers
        self.first = layers.start == 0
        self.last = layers.end == num_layers
        self.device = device
        self.dtype = dtype
        attention.register()
        config = AutoConfig.from_pretrained(folder)
        if max_context_tokens:
            config.max_position_embeddings = max_context_tokens
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention.NAME, dtype=dtype
            )
        self.model = model.eval()
        self._base = self._find_base()
        self._cut()
        if tensor_mesh is not None:
            self._shard(tensor_mesh)
        self._load(folder)
        self._fill_buffers()
        self.hidden_size: int = config.get_text_config().hidden_size
        if not self.first:
            self._check_cut()

    @property
    def num_parameters(self) -> int:
        """Elements that this rank holds; a parameter used twice counts once."""
        return sum(_local(parameter).numel() for parameter in self.model.parameters())

    @property
    def parameter_bytes(self) -> int:
        return sum(_local(parameter).numel() * parameter.element_size() for parameter in self.model.parameters())

    @torch.inference_mode()
    def forward(
        self,
        source: torch.Tensor,
        positions: torch.Tensor,
        pool: KvPool,
        chunks: list[PlacedChunk],
        logits_of: list[int],
    ) -> torch.Tensor:
        """One step through this stage.

        Args:
            source: token ids [T] on the first stage, hidden states [T, hidden] on the others.
            positions: [T], of each token in its request.
            logits_of: tokens of the step whose logits are wanted; only the last stage gives any.

        Returns:
            Hidden states [T, hidden]; or, on the last stage, logits [len(logits_of), vocab].
        """
        cache = StepCache(pool, chunks)
        arguments: dict[str, Any] = {
            "position_ids": positions.unsqueeze(0),
            "cache": cache,
            "use_cache": True,
            "step_cache": cache,
            ("input_ids" if self.first else "inputs_embeds"): source.unsqueeze(0),
        }
        if self.last and logits_of:
            wanted = torch.tensor(logits_of, device=self.device)
            logits: torch.Tensor = self.model(**arguments, logits_to_keep=wanted).logits[0]
            return logits
        hidden: torch.Tensor = self._base(**arguments).last_hidden_state[0]
        return hidden

    def layer_seconds(
        self, source: torch.Tensor, positions: torch.Tensor, pool: KvPool, chunks: list[PlacedChunk]
    ) -> tuple[list[float], float]:
        """Seconds of each of this stage's layers in one step, and of what is beside them. See `forward`."""
        marks: list[float] = []

        def mark(*_: object) -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

        layers: Any = self._base.layers
        hooks = []
        for number in range(self.layers.start, self.layers.end):
            hooks += [layers[number].register_forward_pre_hook(mark), layers[number].register_forward_hook(mark)]
        try:
            mark()
            self.forward(source, positions, pool, chunks, [len(positions) - 1] if self.last else [])
            mark()
        finally:
            for hook in hooks:
                hook.remove()
        begun, *inner, ended = marks
        taken = [end - start for start, end in zip(inner[::2], inner[1::2], strict=True)]
        return taken, ended - begun - sum(taken)

    def empty(self, num_tokens: int) -> torch.Tensor:
        """Hidden states [T, hidden] that mean nothing."""
        return torch.zeros(num_tokens, self.hidden_size, dtype=self.dtype, device=self.device)

    def _find_base(self) -> nn.Module:
        base = getattr(self.model, self.model.base_model_prefix, None)
        plan = getattr(self.model.config, "base_model_pp_plan", None)
        if base is None or not plan or not isinstance(getattr(base, "layers", None), nn.ModuleList):
            raise UnsupportedModel(
                f"{type(self.model).__name__} publishes no pipeline plan (base_model_pp_plan), so it cannot be cut "
                "into stages. Choose a decoder-only architecture that does."
            )
        return base  # type: ignore[no-any-return]

    def _cut(self) -> None:
        """Drops what other stages hold. The list of layers keeps its length, so layer numbers stay true."""
        base, model = self._base, self.model
        layers: Any = base.layers
        for number in range(len(layers)):
            if not self.layers.start <= number < self.layers.end:
                layers[number] = _Absent()
        # What the pipeline plan names beside the layers: first the embedding, then norms and the head.
        names = list(self.model.config.base_model_pp_plan)
        position = names.index("layers")
        if not self.first:
            for name in names[:position]:
                setattr(base, name, _Absent())
        if not self.last:
            for name in names[position + 1 :]:
                setattr(base, name, _Absent())
            model.set_output_embeddings(_Absent())
        elif self._tied():
            # A weight of its own while it is sharded and loaded; one object again afterwards.
            head = model.get_output_embeddings()
            head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)

    def _tied(self) -> bool:
        return bool(self.model.config.get_text_config().tie_word_embeddings)

    def _shard(self, mesh: DeviceMesh) -> None:
        plan = dict(self.model.tp_plan or {})
        if not plan:
            raise UnsupportedModel(f"{type(self.model).__name__} publishes no tensor-parallel plan; use tp = 1.")
        named = self.model._expand_parallel_plan(plan)  # noqa: SLF001 - transformers' own expansion of its plan
        absent = {name for name, module in self.model.named_modules() if isinstance(module, _Absent)}
        apply_tensor_parallelism(self.model, mesh, {name: style for name, style in named.items() if name not in absent})

    def _load(self, folder: Path) -> None:
        checkpoint = _Checkpoint(folder)
        embedding = f"{self.model.base_model_prefix}.embed_tokens.weight"
        head = self.model.get_output_embeddings() if self.last else None
        with checkpoint.open():
            for name, parameter in list(self.model.named_parameters()):
                owner, _, leaf = name.rpartition(".")
                module = self.model.get_submodule(owner)
                source = embedding if self._tied() and module is head and name not in checkpoint else name
                if source not in checkpoint:
                    raise UnsupportedModel(
                        f"the checkpoint has no tensor {source!r}; {type(self.model).__name__} wants its weights "
                        "converted on loading (fused experts, for example), which stages do not do yet."
                    )
                module._parameters[leaf] = self._read(checkpoint, source, parameter)  # noqa: SLF001
        if self._tied() and self.first and head is not None:
            head.weight = self.model.get_input_embeddings().weight

    def _read(self, checkpoint: _Checkpoint, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's slice of one tensor."""
        if not isinstance(parameter, DTensor):
            whole = checkpoint.read(name, tuple(slice(0, size) for size in parameter.shape))
            return nn.Parameter(whole.to(self.device, self.dtype), requires_grad=False)
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        part = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        local = checkpoint.read(name, part).contiguous().to(self.device, self.dtype)
        sharded = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        return nn.Parameter(sharded, requires_grad=False)

    def _fill_buffers(self) -> None:
        """Buffers are computed, not stored: `transformers` fills them when it initialises a module."""
        for module in self.model.modules():
            buffers = dict(module.named_buffers(recurse=False))
            if not any(buffer.is_meta for buffer in buffers.values()):
                continue
            if list(module.parameters(recurse=False)):
                raise UnsupportedModel(f"{type(module).__name__} has both weights and buffers; stages cannot load it.")
            for name, buffer in buffers.items():
                module._buffers[name] = torch.empty_like(buffer, device=self.device)  # noqa: SLF001
            self.model._init_weights(module)  # noqa: SLF001 - the only place where they are computed

    @torch.inference_mode()
    def _check_cut(self) -> None:
        """Without its layers and norm, a later stage must pass hidden states on unchanged.

        Architectures that scale embeddings inside the model's forward would scale them once per stage.
        """
        plan = list(self.model.config.base_model_pp_plan)
        names = plan[plan.index("layers") :]
        held = {name: getattr(self._base, name) for name in names}
        probe = torch.linspace(-1, 1, self.hidden_size, device=self.device, dtype=self.dtype).view(1, 1, -1)
        try:
            for name, module in held.items():
                bare = nn.ModuleList(_Absent() for _ in module) if isinstance(module, nn.ModuleList) else _Absent()
                setattr(self._base, name, bare)
            passed = self._base(
                inputs_embeds=probe,
                position_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device),
                use_cache=False,
            ).last_hidden_state
        finally:
            for name, module in held.items():
                setattr(self._base, name, module)
        if not torch.equal(passed, probe):
            raise UnsupportedModel(
                f"{type(self.model).__name__} changes hidden states outside its layers, so it cannot be cut into "
                "stages; use pp = 1."
            )


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Checkpoint:
    """The safetensors files of a folder, read by slices. `read_model_folder` has checked that they are whole."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        self._folder = folder
        if index.exists():
            self._files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            with safe_open(folder / "model.safetensors", "pt") as file:
                self._files = dict.fromkeys(file.keys(), "model.safetensors")
        self._open: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        with self._stack:
            yield

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._folder / file, "pt"))
        tensor: torch.Tensor = self._open[file].get_slice(name)[part]
        return tensor

"""The cluster file: which groups exist, where they listen, how they are laid out.

One TOML file describes a cluster; every process reads the section that bears its name. Values are checked
here once, and errors name the key and what it allows. What depends on the model (heads, layers, context) is
checked by whoever reads the model folder.
"""

from __future__ import annotations

import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from headwater.errors import InvalidConfig

Address = Annotated[str, Meta(pattern=r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$")]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
_LARGEST_PORT = 65535
# A day is no deadline any more.
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = typing.get_args(Dtype)
Transport = Literal["auto", "tcp", "rdma"]
DecodePolicy = Literal["round_robin", "least_loaded", "power_of_two"]
PrefillPolicy = Literal["round_robin", "least_loaded", "power_of_two", "predicted_ttft", "prefix_affinity"]
_Section = typing.TypeVar("_Section", "Prefill", "Decode")


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """What every group serves."""

    # A Hugging Face folder with config.json, safetensors and tokenizer.json; the same path on every host.
    path: str
    # Overrides max_position_embeddings of config.json.
    max_context_tokens: Positive | None = None
    # "auto": bfloat16 where the processor computes it natively, else float32.
    dtype: Dtype = "auto"


class Router(Struct, frozen=True, forbid_unknown_fields=True):
    """The router process."""

    address: Address = "127.0.0.1:7000"
    metrics_port: Port = 0
    # Where the live page and the list of processes for Prometheus are served, by HTTP. Port 0 takes a free one. Keep it
    # on loopback, or in a network that is trusted: it asks for no token.
    page_address: Address = "127.0.0.1:0"
    name: Name = "router"
    # Requests that may be under way at once; one more is refused.
    max_requests: Positive = 4096
    # Of those, how many may wait for a group that can take them, for `deadlines.pair` at most; one more is refused.
    # 0: none waits, and what no group can take now fails at once.
    max_waiting: Annotated[int, Meta(ge=0)] = 1024
    # Prompts of at most so many tokens are computed by the decode node itself, where it can: no prefill group, no
    # transfer, but the node decodes nothing else meanwhile. 0: none.
    local_prefill_tokens: Annotated[int, Meta(ge=0)] = 0
    # Which of the groups that fit gets a request (`router.policies`). "predicted_ttft" takes the one that by its own
    # costs has the first token soonest; "prefix_affinity" prefers those that have the prompt's beginning still more.
    prefill_policy: PrefillPolicy = "predicted_ttft"
    decode_policy: DecodePolicy = "least_loaded"


class Prefill(Struct, frozen=True, forbid_unknown_fields=True):
    """One prefill group: a leader and pp × tp workers."""

    name: Name
    # Where the leader listens, for the router and for its workers.
    address: Address
    pp: Positive = 1
    tp: Positive = 1
    # First layer of each stage after the first; absent: as even as it goes, larger shares late.
    layer_splits: tuple[Positive, ...] | None = None
    # Split the layers by what they and what is beside them (embedding, head) take on this machine, which is measured at
    # the first start.
    measure_layers: bool = False
    # Most tokens of a step: the size of "fixed" chunks, of the first of "dynamic" ones, and the most of "optimal" ones.
    chunk_tokens: Positive = 512
    # "fixed": equal chunks. "dynamic": smaller ones as the prefix grows, so that each takes as long as the first.
    # "optimal": the cuts that let the last stage be done soonest. The latter two measure the stages at the first start.
    chunk_policy: Literal["fixed", "dynamic", "optimal"] = "fixed"
    # How far "dynamic" follows the measured cost: 0 not at all, 1 all the way.
    chunk_smoothing: Annotated[float, Meta(ge=0, le=1)] = 0.75
    # Steps that a stage has beyond the one it computes; pp · (1 + look_ahead) are under way at most. A cancelled
    # request may cost the first stage as many, and each other one more.
    look_ahead: Annotated[int, Meta(ge=0, le=16)] = 1
    # Seconds without a chunk after which a request goes before all others.
    max_wait: Seconds = 10.0
    page_size: Positive = 64
    # Tokens whose KV fits the group's pool.
    pool_tokens: Positive = 32768
    # Keep the KV of prompts, as long as no request needs its pages, for later prompts that begin with the same tokens;
    # a request's first whole pages that are there are not computed again.
    prefix_cache: bool = True
    # Requests that hold pages at the same time.
    max_running_requests: Positive = 16
    # Requests that wait for pages; one more is refused.
    max_queued_requests: Positive = 256
    # Hosts of the ranks in order, each taking an equal share; absent: all on the leader's host.
    hosts: tuple[str, ...] | None = None
    # "emulated" replaces computing by waiting as long as `emulated_profile` says, times `emulated_time_scale`. All else
    # is real: leader, workers, activations, KV of the model's size, transfers. Answers mean nothing.
    device: Literal["cpu", "cuda", "emulated"] = "cpu"
    emulated_profile: str = "h20-qwen3-235b-a22b-fp8-tp4"
    emulated_time_scale: Annotated[float, Meta(gt=0, le=100)] = 1.0
    threads_per_rank: Positive = 1
    # Cores to pin the ranks to, in rank order; empty: not pinned.
    cores: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    # Memory of one rank for packed KV on its way out.
    send_buffer_mb: Positive = 64
    # Replaces model.dtype for this group; KV is converted on its way to decode nodes of another one.
    dtype: Dtype | None = None
    metrics_port: Port = 0
    transport: Transport = "auto"


class Decode(Struct, frozen=True, forbid_unknown_fields=True):
    """One decode node on stock `transformers`."""

    name: Name
    address: Address
    # Tokens, prompt and answer, that admitted requests may hold together.
    capacity_tokens: Positive = 32768
    max_requests: Positive = 16
    threads: Positive = 1
    cores: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    # Landing area for packed KV: slots of slot_kb each.
    slot_kb: Positive = 16384
    num_slots: Positive = 64
    # Slots that one writer of one transfer may own: one is written, one unpacked, and one on its way back.
    slots_per_writer: Positive = 4
    # "staged": writers write packed KV into landing slots, whatever the layouts. "direct": they write page to page
    # into the request's memory where that pays, which saves two copies; a writer that is lost costs the memory's
    # addresses.
    delivery: Literal["staged", "direct"] = "staged"
    # Element type of KV on its way: "auto" is the narrower of the two groups' types. "float8_e4m3fn" halves the
    # bytes of bfloat16 and rounds (`kv_transfer.wire` states the error).
    wire_dtype: Literal["auto", "float8_e4m3fn"] = "auto"
    # Check every box of KV against a digest of what was sent.
    digests: bool = True
    # Replaces model.dtype for this node; KV is converted on its way.
    dtype: Dtype | None = None
    metrics_port: Port = 0
    transport: Transport = "auto"


class Deadlines(Struct, frozen=True, forbid_unknown_fields=True):
    """Every wait ends; these say when, in seconds."""

    # An answer from a peer that only has to think (describe, grant, open a delivery).
    reply: Seconds = 5.0
    # A request that no group can take now (all are full, restarting or not reachable) waits in the router.
    pair: Seconds = 10.0
    # How often the router asks each group how it is.
    heartbeat: Seconds = 0.5
    # A worker (or its leader) that is not heard of for so long is lost, though its connection stands.
    silence: Seconds = 15.0
    # Workers build their stage and load weights.
    worker_start: Seconds = 600.0
    # One step through the whole pipeline.
    step: Seconds = 600.0
    # One write by the transfer engine. It is given up for the transfer then, and watched until it is over.
    write: Seconds = 30.0
    # The receiver acknowledges a receipt, or grants a slot.
    acknowledge: Seconds = 60.0
    # A request gets pages and its first step.
    queue: Seconds = 600.0
    # A transfer's next chunk arrives; starts with its first chunk. Longer than a chunk takes to compute.
    lease: Seconds = 120.0
    # What was delivered (or was to be) is kept after the other group was lost, for another one to go on from.
    resume: Seconds = 10.0
    # Both legs of a cancelled or finished request end.
    stop: Seconds = 10.0
    # What runs when a process is told to stop may still end.
    drain: Seconds = 30.0


class Security(Struct, frozen=True, forbid_unknown_fields=True):
    """Of every process; see `headwater.security`. All are paths, the same on every host."""

    # PEM files: who signs, this host's certificate (for every address in this file that is this host's), its key.
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    # Servers ask for a certificate that tls_ca has signed, of clients too.
    mutual: bool = True
    # A file with the token that clients of the router must send ("authorization: Bearer ...").
    token_file: str = ""
    # Without a certificate: listen on addresses that others can reach.
    allow_plain_text: bool = False


class Cluster(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    model: Model
    router: Router = Router()
    prefill: tuple[Prefill, ...] = ()
    decode: tuple[Decode, ...] = ()
    # Routers that the groups of this file register with; those of this file's own router need not.
    routers: tuple[Address, ...] = ()
    deadlines: Deadlines = Deadlines()
    security: Security = Security()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # One JSON object a line, or lines for people.
    log_format: Literal["json", "human"] = "json"

    def prefill_named(self, name: str) -> Prefill:
        return _named(self.prefill, name, "prefill")

    def decode_named(self, name: str) -> Decode:
        return _named(self.decode, name, "decode")


def _named(sections: tuple[_Section, ...], name: str, role: str) -> _Section:
    for section in sections:
        if section.name == name:
            return section
    known = ", ".join(section.name for section in sections) or "none"
    raise InvalidConfig(f"the cluster file has no {role} group named {name!r}; it has: {known}.")


def load_cluster(path: Path, dtype: str | None = None) -> Cluster:
    """Reads and checks a cluster file.

    Args:
        dtype: replaces model.dtype, when given.

    Raises:
        InvalidConfig: the file is missing, not TOML, or a key or value is not allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"cannot read the cluster file {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"cannot read the cluster file {path}: it is not UTF-8 text.") from error
    try:
        cluster = parse_cluster(text)
        if dtype is None:
            return cluster
        model = msgspec.convert(msgspec.structs.asdict(cluster.model) | {"dtype": dtype}, Model)
        return msgspec.structs.replace(cluster, model=model)
    except InvalidConfig as error:
        raise InvalidConfig(f"{path}: {error}") from error


def parse_cluster(text: str) -> Cluster:
    """`load_cluster` for a text."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"not valid TOML: {error}.") from error
    try:
        cluster = msgspec.convert(raw, Cluster)
    except msgspec.ValidationError as error:
        raise InvalidConfig(_explain(str(error))) from error
    _check_names_and_addresses(cluster)
    for group in cluster.prefill:
        _check_prefill(group)
    security = cluster.security
    if len({bool(value) for value in (security.tls_ca, security.tls_cert, security.tls_key)}) > 1:
        raise InvalidConfig("security: tls_ca, tls_cert and tls_key belong together; give all three, or none.")
    return cluster


def _check_names_and_addresses(cluster: Cluster) -> None:
    seen: dict[str, str] = {}
    names: dict[str, str] = {}
    sections: list[tuple[str, Router | Prefill | Decode]] = [
        ("router", cluster.router),
        *(("prefill", group) for group in cluster.prefill),
        *(("decode", group) for group in cluster.decode),
    ]
    for role, section in sections:
        if section.name in names:
            raise InvalidConfig(
                f"{role} {section.name}: name {section.name!r} is also used by a {names[section.name]} section; "
                "give each its own name."
            )
        names[section.name] = role
        _check_address("address", section.address, f"{role} {section.name}", seen)
    _check_address("page_address", cluster.router.page_address, f"router {cluster.router.name}", seen)


def _check_address(key: str, address: str, section: str, seen: dict[str, str]) -> None:
    """Raises InvalidConfig for a port that cannot be, or is another section's; notes in `seen` whose it is."""
    port = int(address.rpartition(":")[2])
    if port > _LARGEST_PORT:
        raise InvalidConfig(f"{section}: {key} {address!r}: a port is at most {_LARGEST_PORT}.")
    if port and address in seen:
        raise InvalidConfig(f"{section}: {key} {address!r} is also used by {seen[address]}.")
    seen[address] = section


def _check_prefill(group: Prefill) -> None:
    where = f"prefill {group.name}"
    world = group.pp * group.tp
    if group.chunk_tokens % group.page_size:
        raise InvalidConfig(
            f"{where}: chunk_tokens = {group.chunk_tokens} must be a multiple of page_size = {group.page_size}."
        )
    if group.layer_splits is not None and group.measure_layers:
        raise InvalidConfig(f"{where}: give layer_splits or measure_layers, not both.")
    if group.layer_splits is not None:
        splits = group.layer_splits
        if len(splits) != group.pp - 1 or list(splits) != sorted(set(splits)):
            raise InvalidConfig(
                f"{where}: layer_splits must be {group.pp - 1} increasing layer numbers (pp - 1), got {list(splits)}."
            )
    if group.hosts is not None and (not group.hosts or world % len(group.hosts)):
        raise InvalidConfig(
            f"{where}: hosts has {len(group.hosts)} entries, which do not share {world} ranks (pp × tp) equally."
        )


# What msgspec says, and how a person who writes TOML would.
_TOML_WORDS = (
    (r"^object missing required field", "missing required key"),
    (r"^object contains unknown field", "unknown key"),
    (r"^expected `str` matching regex .*", "wrong form"),
    (r"^invalid enum value '(.*)'$", r'"\1" is not allowed'),
    (r" \| null`", "`"),
    ("`object`", "`table`"),
    ("`str`", "`string`"),
    ("`bool`", "`boolean`"),
    ("`int`", "`integer`"),
)


def _explain(message: str) -> str:
    """Msgspec's message with the key and the words of TOML, and what the key allows."""
    match = re.fullmatch(r"(.*?)(?: - at `(\$[^`]*)`)?", message, re.DOTALL)
    what, where = (match.group(1), match.group(2) or "$") if match else (message, "$")
    what = what[:1].lower() + what[1:]
    for pattern, words in _TOML_WORDS:
        what = re.sub(pattern, words, what, flags=re.DOTALL)
    key = where.removeprefix("$").removeprefix(".") or "the top level"
    allowed = _allowed(_type_at(where))
    return f"{key}: {what}.{f' Allowed: {allowed}.' if allowed else ''}"


def _strip(kind: Any) -> Any:
    """Without Annotated and None."""
    if typing.get_origin(kind) is Annotated:
        return _strip(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return _strip(next(arg for arg in typing.get_args(kind) if arg is not type(None)))
    return kind


def _type_at(where: str) -> Any:
    kind: Any = Cluster
    for field in re.findall(r"\.(\w+)|\[", where.removeprefix("$")):
        kind = _strip(kind)
        if not field:
            kind = typing.get_args(kind)[0]
        elif isinstance(kind, type) and issubclass(kind, Struct):
            kind = typing.get_type_hints(kind, include_extras=True)[field]
    return kind


def _allowed(kind: Any) -> str:
    if kind == Address:
        return '"host:port", for example "127.0.0.1:7000"'
    if kind == Name:
        return "lower-case letters, digits and inner hyphens, 63 at most"
    kind = _strip(kind)
    if typing.get_origin(kind) is Literal:
        return ", ".join(f'"{value}"' for value in typing.get_args(kind))
    if typing.get_origin(kind) is tuple and (section := _strip(typing.get_args(kind)[0])) in (Prefill, Decode):
        return f"any number of [[{section.__name__.lower()}]] sections"
    if isinstance(kind, type) and issubclass(kind, Struct):
        return ", ".join(kind.__struct_fields__)
    return ""

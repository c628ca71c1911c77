"""`headwater init`: a cluster file to begin with."""

from __future__ import annotations

from pathlib import Path

from headwater.errors import InvalidConfig

_TEMPLATE = """\
# A Headwater cluster: one router, prefill groups, decode nodes. The same file on every host.
# All keys: `headwater config schema`. What is wrong with it, and what it adds up to: `headwater check {name}`.
# log_level = "info"
# log_format = "json"             # or "human"

[model]
# A Hugging Face folder with config.json, safetensors and tokenizer.json; the same path on every host.
path = "{model}"
# max_context_tokens = 131072   # instead of max_position_embeddings of config.json
# dtype = "auto"                # "bfloat16", "float16" or "float32"

[router]
address = "127.0.0.1:7000"      # where clients ask; a host's own address to be reached from elsewhere
# metrics_port = 9100           # 0, the default, lets the system choose; `headwater status` shows it
# page_address = "127.0.0.1:7080"   # of the live page; default: a free port, on this host only
# prefill_policy = "predicted_ttft"
# decode_policy = "least_loaded"
# local_prefill_tokens = 0      # prompts up to so many tokens are computed by the decode node
# max_requests = 4096
# max_waiting = 1024            # of those, how many may wait for groups that are full or restarting

[[prefill]]
name = "prefill-0"
address = "127.0.0.1:7100"      # of the group's leader
pp = {pp}                          # stages, each with a part of the layers
tp = {tp}                          # ranks of a stage, each with a part of the heads
# hosts = ["10.0.0.1", "10.0.0.2"]   # of the ranks in order, an equal share each; default: the leader's host
# cores = [0, 1]                # pin ranks to cores, in rank order
chunk_tokens = 512
# chunk_policy = "optimal"      # or "dynamic", "fixed"; the first two measure the stages at the first start
pool_tokens = 32768             # whose KV fits: the longest prompt, and all that run at once
# prefix_cache = true           # prompts that begin alike are computed from where they differ
# transport = "auto"            # "rdma" or "tcp"

[[decode]]
name = "decode-0"
address = "127.0.0.1:7200"
capacity_tokens = 32768         # of prompts and answers together
# delivery = "staged"           # or "direct"
# wire_dtype = "auto"           # or "float8_e4m3fn": half the bytes, with the error that it has

# [deadlines]                   # in seconds; every wait ends
# pair = 10                     # a request that no group can take now waits in the router
# queue = 600                   # a request gets pages and its turn
# step = 600                    # one step through the whole pipeline
# drain = 30                    # what runs when a process is told to stop may still end
"""


def write_cluster_file(path: Path, model: str, pp: int, tp: int) -> None:
    """Writes a commented cluster file.

    Raises:
        InvalidConfig: there is a file already, or it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_TEMPLATE.format(name=path.name, model=model, pp=pp, tp=tp))
    except FileExistsError:
        raise InvalidConfig(f"{path} exists; choose another name, or remove it first.") from None
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be written: {error.strerror}.") from error

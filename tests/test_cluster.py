"""The cluster file: defaults, and errors that name the key and what it allows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headwater.cluster import Cluster, Deadlines, Decode, Model, Prefill, Router, load_cluster, parse_cluster
from headwater.errors import InvalidConfig

MODEL = '[model]\npath = "m"\n'
P0 = '[[prefill]]\nname = "p0"\naddress = "h:1"\n'
D0 = '[[decode]]\nname = "d0"\naddress = "h:2"\n'
PREFILL_KEYS = ", ".join(Prefill.__struct_fields__)
DECODE_KEYS = ", ".join(Decode.__struct_fields__)


def test_defaults() -> None:
    cluster = parse_cluster(MODEL + P0 + D0)
    assert cluster == Cluster(
        model=Model(path="m", max_context_tokens=None, dtype="auto"),
        router=Router(address="127.0.0.1:7000", metrics_port=0, name="router"),
        prefill=(
            Prefill(
                name="p0",
                address="h:1",
                pp=1,
                tp=1,
                layer_splits=None,
                measure_layers=False,
                chunk_tokens=512,
                chunk_policy="fixed",
                chunk_smoothing=0.75,
                look_ahead=1,
                max_wait=10,
                page_size=64,
                pool_tokens=32768,
                prefix_cache=True,
                max_running_requests=16,
                max_queued_requests=256,
                hosts=None,
                device="cpu",
                threads_per_rank=1,
                cores=(),
                send_buffer_mb=64,
                metrics_port=0,
                transport="auto",
            ),
        ),
        decode=(
            Decode(
                name="d0",
                address="h:2",
                capacity_tokens=32768,
                max_requests=16,
                threads=1,
                cores=(),
                slot_kb=16384,
                num_slots=64,
                slots_per_writer=4,
                metrics_port=0,
                transport="auto",
            ),
        ),
        deadlines=Deadlines(
            reply=5,
            heartbeat=0.5,
            worker_start=600,
            step=600,
            write=30,
            acknowledge=60,
            queue=600,
            lease=120,
            resume=10,
            stop=10,
        ),
        log_level="info",
    )


def test_every_key_is_read() -> None:
    cluster = parse_cluster("""
        log_level = "debug"
        [model]
        path = "m"
        max_context_tokens = 10
        dtype = "float16"
        [router]
        address = "[::1]:7000"
        name = "front"
        [[prefill]]
        name = "p0"
        address = "a.b-c_d:65535"
        pp = 3
        layer_splits = [1, 5]
        chunk_tokens = 128
        page_size = 32
        hosts = ["a", "b", "c"]
        cores = [2, 3, 4]
        transport = "rdma"
        [deadlines]
        reply = 1
        write = 5
    """)
    (group,) = cluster.prefill
    assert (group.pp, group.layer_splits, group.hosts, group.cores) == (3, (1, 5), ("a", "b", "c"), (2, 3, 4))
    assert (cluster.router.address, cluster.model.dtype, cluster.log_level) == ("[::1]:7000", "float16", "debug")
    assert (cluster.deadlines.reply, cluster.deadlines.write) == (1.0, 5.0)


def test_nothing_can_be_changed_afterwards() -> None:
    cluster = parse_cluster(MODEL)
    with pytest.raises(AttributeError):
        cluster.log_level = "debug"  # type: ignore[misc]


# What follows the [model] section, and the whole message.
REFUSED = [
    # Unknown and missing keys list the allowed ones.
    ("colour = 1", "model: unknown key `colour`. Allowed: path, max_context_tokens, dtype."),
    (P0 + "[prefill.x]", f"prefill[0]: unknown key `x`. Allowed: {PREFILL_KEYS}."),
    (
        D0 + D0.replace("0", "1").replace("h:2", "h:3") + "slots = 1",
        f"decode[1]: unknown key `slots`. Allowed: {DECODE_KEYS}.",
    ),
    (
        "[deadlines]\nanswer = 1",
        "deadlines: unknown key `answer`. Allowed: reply, pair, heartbeat, silence, worker_start, step, write, "
        "acknowledge, queue, lease, resume, stop, drain.",
    ),
    ('[[prefill]]\nname = "p0"', f"prefill[0]: missing required key `address`. Allowed: {PREFILL_KEYS}."),
    # Types, in the words of TOML.
    ('max_context_tokens = "a"', "model.max_context_tokens: expected `integer`, got `string`."),
    (P0 + "pp = 1.5", "prefill[0].pp: expected `integer`, got `float`."),
    (P0 + "pp = true", "prefill[0].pp: expected `integer`, got `boolean`."),
    (
        '[prefill]\nname = "p0"',
        "prefill: expected `array`, got `table`. Allowed: any number of [[prefill]] sections.",
    ),
    (P0 + "pp = 2\nlayer_splits = 3", "prefill[0].layer_splits: expected `array`, got `integer`."),
    (P0 + 'pp = 2\nlayer_splits = ["a"]', "prefill[0].layer_splits[0]: expected `integer`, got `string`."),
    # Ranges.
    ("max_context_tokens = 0", "model.max_context_tokens: expected `integer` >= 1."),
    (P0 + "tp = 0", "prefill[0].tp: expected `integer` >= 1."),
    (P0 + "cores = [0, -1]", "prefill[0].cores[1]: expected `integer` >= 0."),
    (D0 + "capacity_tokens = -1", "decode[0].capacity_tokens: expected `integer` >= 1."),
    ("[router]\nmetrics_port = 65536", "router.metrics_port: expected `integer` <= 65535."),
    ("[deadlines]\nreply = 0", "deadlines.reply: expected `float` > 0.0."),
    ("[deadlines]\nreply = inf", "deadlines.reply: expected `float` <= 86400.0."),
    # Enumerations.
    ('dtype = "int8"', 'model.dtype: "int8" is not allowed. Allowed: "auto", "float32", "bfloat16", "float16".'),
    (P0 + 'device = "tpu"', 'prefill[0].device: "tpu" is not allowed. Allowed: "cpu", "cuda", "emulated".'),
    (D0 + 'transport = "ib"', 'decode[0].transport: "ib" is not allowed. Allowed: "auto", "tcp", "rdma".'),
    # Addresses and names.
    (
        '[router]\naddress = "h"',
        'router.address: wrong form. Allowed: "host:port", for example "127.0.0.1:7000".',
    ),
    ('[router]\naddress = "h:65536"', "router router: address 'h:65536': a port is at most 65535."),
    (
        '[router]\nname = "A"',
        "router.name: wrong form. Allowed: lower-case letters, digits and inner hyphens, 63 at most.",
    ),
    (
        f'[router]\nname = "{"a" * 64}"',
        "router.name: expected `string` of length <= 63. "
        "Allowed: lower-case letters, digits and inner hyphens, 63 at most.",
    ),
    (
        P0 + P0.replace("h:1", "h:3"),
        "prefill p0: name 'p0' is also used by a prefill section; give each its own name.",
    ),
    (
        P0 + D0.replace("d0", "p0"),
        "decode p0: name 'p0' is also used by a prefill section; give each its own name.",
    ),
    (
        P0.replace("p0", "router"),
        "prefill router: name 'router' is also used by a router section; give each its own name.",
    ),
    (P0 + D0.replace("h:2", "h:1"), "decode d0: address 'h:1' is also used by prefill p0."),
    (
        '[router]\naddress = "h:1"\n' + P0,
        "prefill p0: address 'h:1' is also used by router router.",
    ),
    # Values that do not go together.
    (P0 + "chunk_tokens = 100", "prefill p0: chunk_tokens = 100 must be a multiple of page_size = 64."),
    (
        P0 + "pp = 3\nlayer_splits = [2]",
        "prefill p0: layer_splits must be 2 increasing layer numbers (pp - 1), got [2].",
    ),
    (
        P0 + "pp = 3\nlayer_splits = [5, 2]",
        "prefill p0: layer_splits must be 2 increasing layer numbers (pp - 1), got [5, 2].",
    ),
    (
        P0 + "pp = 3\nlayer_splits = [5, 5]",
        "prefill p0: layer_splits must be 2 increasing layer numbers (pp - 1), got [5, 5].",
    ),
    (
        P0 + "pp = 2\nlayer_splits = [3]\nmeasure_layers = true",
        "prefill p0: give layer_splits or measure_layers, not both.",
    ),
    (P0 + "pp = 2\nlayer_splits = [0]", "prefill[0].layer_splits[0]: expected `integer` >= 1."),
    (
        P0 + 'pp = 2\ntp = 2\nhosts = ["a", "b", "c"]',
        "prefill p0: hosts has 3 entries, which do not share 4 ranks (pp × tp) equally.",
    ),
    (P0 + "hosts = []", "prefill p0: hosts has 0 entries, which do not share 1 ranks (pp × tp) equally."),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message.partition(".")[0] for _, message in REFUSED])
def test_error_names_the_key_and_what_it_allows(text: str, message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_cluster(MODEL + text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the top level: missing required key `model`"),
        ("x = 1\n" + MODEL, "the top level: unknown key `x`"),
        ('model = "m"', "model: expected `table`, got `string`. Allowed: path, max_context_tokens, dtype."),
        ("[model]", "model: missing required key `path`. Allowed: path, max_context_tokens, dtype."),
        ("[model]\npath = 3", "model.path: expected `string`, got `integer`."),
        (
            'log_level = "loud"\n' + MODEL,
            'log_level: "loud" is not allowed. Allowed: "debug", "info", "warning", "error".',
        ),
        ("[model]\npath = ", "not valid TOML: Invalid value (at end of document)."),
    ],
)
def test_error_of_the_whole_file(text: str, message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_cluster(text)
    assert str(caught.value).startswith(message)


def test_port_zero_may_be_used_twice() -> None:
    cluster = parse_cluster(MODEL + P0.replace("h:1", "h:0") + D0.replace("h:2", "h:0"))
    assert (cluster.prefill[0].address, cluster.decode[0].address) == ("h:0", "h:0")


def test_group_by_name() -> None:
    cluster = parse_cluster(MODEL + P0)
    assert cluster.prefill_named("p0") is cluster.prefill[0]
    with pytest.raises(InvalidConfig, match=r"^the cluster file has no prefill group named 'p1'; it has: p0\.$"):
        cluster.prefill_named("p1")
    with pytest.raises(InvalidConfig, match=r"^the cluster file has no decode group named 'd0'; it has: none\.$"):
        cluster.decode_named("d0")


def test_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    with pytest.raises(InvalidConfig, match="^cannot read the cluster file .*c.toml: No such file or directory"):
        load_cluster(path)
    path.write_bytes(b'[model]\npath = "\xff"')
    with pytest.raises(InvalidConfig, match="^cannot read the cluster file .*c.toml: it is not UTF-8 text"):
        load_cluster(path)
    path.write_text("[model]\n", encoding="utf-8")
    with pytest.raises(InvalidConfig, match="c.toml: model: missing required key `path`"):
        load_cluster(path)
    path.write_text(MODEL, encoding="utf-8")
    assert load_cluster(path) == msgspec.convert({"model": {"path": "m"}}, Cluster)

"""--kv-transfer-config and --kv-peer: what is taken, and what is refused."""

import json
import socket

import pytest
from sharing_engine import ABOUT, PAGES, transfer

from openinfer.kvpool import InvalidConfig
from openinfer.kvpool.tiers import Sharing, TransferConfig, parse_peers
from openinfer.kvpool.tiers.peers import nixl


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "this is no JSON"),
        ("[" * 100_000, "this is no JSON"),
        ('{"kv_port": ' + "9" * 5000 + "}", "this is no JSON"),
        ("[]", "must be an object with kv_connector"),
        ('{"kv_role": "kv_both"}', "must be an object with kv_connector"),
        ('{"kv_connector": "LMCacheConnectorV1"}', "NixlConnector, TcpConnector are possible"),
        ('{"kv_connector": "TcpConnector", "kv_roles": 1}', "keys among kv_connector, kv_role"),
        (
            '{"kv_connector": "TcpConnector", "kv_role": "x"}',
            "kv_producer, kv_consumer, kv_both are possible",
        ),
        ('{"kv_connector": "TcpConnector", "kv_buffer_device": "cuda"}', "travel through host memory"),
        ('{"kv_connector": "TcpConnector", "kv_buffer_size": 0}', "give bytes, more than 0"),
        ('{"kv_connector": "TcpConnector", "kv_port": "x"}', "0 to 65535 are possible"),
        ('{"kv_connector": "TcpConnector", "kv_rank": 3}', "kv_rank has no meaning here"),
        ('{"kv_connector": "TcpConnector", "engine_id": ""}', "engine_id is ''"),
        ('{"kv_connector": "TcpConnector", "kv_load_failure_policy": "x"}', "recompute, fail are possible"),
        ('{"kv_connector": "TcpConnector", "kv_connector_extra_config": {"x": 1}}', "x is 1; possible are"),
        (
            '{"kv_connector": "TcpConnector", "kv_connector_extra_config": {"kv_lease_duration": -1}}',
            "kv_lease_duration is -1.0",
        ),
        (
            '{"kv_connector": "TcpConnector", "kv_connector_extra_config": {"share_memory": 1}}',
            "share_memory is 1; possible are",
        ),
        ('{"kv_connector": "TcpConnector", "kv_ip": 7}', "kv_ip is 7; it must be a text"),
        ('{"kv_connector": "TcpConnector", "kv_buffer_size": NaN}', "kv_buffer_size is nan"),
        ('{"kv_connector": "TcpConnector", "kv_buffer_size": Infinity}', "kv_buffer_size is inf"),
        ('{"kv_connector": "TcpConnector", "kv_connector_extra_config": null}', "it must be an object"),
        ('{"kv_connector": "TcpConnector", "kv_connector_extra_config": [1]}', "it must be an object"),
        (
            '{"kv_connector": "TcpConnector", "kv_connector_extra_config": {"kv_lease_duration": NaN}}',
            "kv_lease_duration is nan",
        ),
        (
            '{"kv_connector": "NixlConnector", "kv_connector_extra_config": {"backends": [7]}}',
            "backends is .7.; give a list of names",
        ),
        (
            '{"kv_connector": "NixlConnector", "kv_connector_extra_config": {"backends": []}}',
            "backends is ..; give a list of names",
        ),
        ('{"kv_connector": "TcpConnector", "kv_ip": "192.0.2.1"}', "can be reached from other hosts"),
        ('{"kv_connector": "TcpConnector", "kv_ip": "0.0.0.0"}', "give an address of this host"),
    ],
)
def test_configurations_that_cannot_be_followed(text, words):
    with pytest.raises(InvalidConfig, match="^(?s:.*)" + words):
        TransferConfig.parse(text)


def test_the_keys_of_vllm():
    given = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail",
             "kv_rank": None, "kv_parallel_size": 1, "kv_connector_extra_config": {"backends": ["UCX"]}}  # fmt: skip
    parsed = TransferConfig.parse(json.dumps(given))
    assert (parsed.kv_role, parsed.kv_port, parsed.lease_s, parsed.backends) == (
        "kv_both",
        14579,
        30.0,
        ["UCX"],
    )
    assert parsed.secret() == b""
    assert parsed.engine_id != TransferConfig.parse(json.dumps(given)).engine_id


def test_secrets_are_files_with_enough_in_them(tmp_path):
    short = tmp_path / "short"
    short.write_text("abc")
    for path, words in ((short, "give at least 16"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(InvalidConfig, match=words):
            transfer(kv_connector_extra_config={"secret_file": str(path)}).secret()


def test_addresses():
    asked, allowed = parse_peers(["a:1", "[::1]:2", "b:*", "10.1.0.0/16:*", "[fd00::/8]:5"])
    assert asked == [("a", 1), ("::1", 2)]

    def admitted(host, port):
        return [one.host for one in allowed if one.admits((host, port))]

    assert admitted("b", 7) == ["b"]
    assert admitted("10.1.255.3", 7) == ["10.1.0.0/16"]
    assert admitted("fd00::1", 5) == ["fd00::/8"]
    for address in (("a", 1), ("10.2.0.1", 7), ("fd00::1", 6), ("10.1.0.1.", 7), ("B", 7), ("", 0)):
        assert admitted(*address) == []
    for text in (
        "a",
        "a:",
        ":1",
        "a:0",
        "a:65536",
        "a:x",
        "a:\u0661",
        "10.1.0.1/16:*",
        "a/8:*",
        ":*",
        "a:" + "9" * 5000,
    ):
        with pytest.raises(InvalidConfig, match="give HOST:PORT"):
            parse_peers([text])


def test_an_address_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidConfig, match="cannot be had"):
        Sharing(TransferConfig("TcpConnector", kv_port=taken.getsockname()[1]), [PAGES], ABOUT)


def test_a_missing_nixl_names_the_command(monkeypatch):
    monkeypatch.setattr(nixl, "_MODULES", ("nixl_that_is_missing._api",))
    with pytest.raises(InvalidConfig, match="pip install --no-deps nixl-cu13"):
        Sharing(transfer("NixlConnector"), [PAGES], ABOUT)

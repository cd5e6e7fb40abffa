"""TLS by file, over HTTP and gRPC (`make service`; makes its certificate with openssl)."""

from __future__ import annotations

import shutil
import ssl
import subprocess

import grpc
import httpx
import pytest

from engine.serve.proto import router_pb2 as pb
from engine.serve.rpc import SERVICE
from tests.serve.conftest import NAME

pytestmark = pytest.mark.slow


@pytest.fixture
def pair(tmp_path):
    openssl = shutil.which("openssl")
    assert openssl, "openssl is missing"
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_both_protocols_speak_tls_and_nothing_else(make_server, pair):
    cert, key = pair
    server = make_server(tls_cert=cert, tls_key=key, grpc_port=0)
    assert server.url.startswith("https://")
    address = f"https://localhost:{server.listener.port}"
    trusted = ssl.create_default_context(cafile=str(cert))
    assert httpx.get(f"{address}/v1/models", verify=trusted).json()["data"][0]["id"] == NAME
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/v1/models")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://localhost:{server.listener.port}/healthz")
    credentials = grpc.ssl_channel_credentials(cert.read_bytes())
    target = f"localhost:{server.rpc.port}"
    with grpc.secure_channel(target, credentials) as channel:
        models = channel.unary_unary(
            f"/{SERVICE}/Models", pb.ModelsRequest.SerializeToString, pb.ModelsResponse.FromString
        )
        assert models(pb.ModelsRequest(), timeout=10).models[0].id == NAME

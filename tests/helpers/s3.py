"""A server on loopback that speaks the S3 protocol (needs s3fs and moto)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PART_BYTES = 5 << 20  # S3 takes no smaller parts, except the last


@contextmanager
def serving() -> Iterator[str]:
    """A server with an empty ``bucket``, while the context lasts; yields its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    try:
        filesystem = connect(address)
        filesystem.call_s3("create_bucket", Bucket="bucket")
        yield address
        filesystem.rm("bucket", recursive=True)
    finally:
        server.stop()


def connect(address: str) -> Any:
    """A client of its own, from any process."""
    import s3fs

    return s3fs.S3FileSystem(
        key="test",
        secret="test",
        client_kwargs={"endpoint_url": address, "region_name": "us-east-1"},
        default_block_size=PART_BYTES,
        skip_instance_cache=True,
    )

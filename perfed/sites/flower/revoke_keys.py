"""``python -m perfed.sites.flower.revoke_keys CONNECTION NAME ...`` revokes all keys of these sites at the SuperLink.

Flower's own command needs the number of a SuperNode, and none of its commands shows which name has which number.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from perfed.errors import PerfedError
from perfed.sites.flower.processes import check_flower

try:
    import click
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
    from flwr.proto.control_pb2 import ListNodesRequest, UnregisterNodeRequest
except ImportError as error:
    check_flower()
    raise PerfedError(f"the installed flwr lacks a part that is needed to revoke a key: {error}") from None


def revoke_keys(connection: str, names: Sequence[str]) -> dict[str, int]:
    """Unregister all keys of these sites at the SuperLink.

    Args:
        connection: The name of the connection to the SuperLink in Flower's configuration.
        names: The names of the sites.

    Returns:
        The number of keys that each site had.

    Raises:
        PerfedError: The SuperLink does not answer, or refuses the request.
    """
    try:
        client = init_http_client_from_connection(read_superlink_connection(connection))
        try:
            with flwr_cli_exc_handler():
                nodes = [node for node in client.ListNodes(ListNodesRequest()).nodes_info if not node.unregistered_at]
                revoked = {name: [node.node_id for node in nodes if node.name == name] for name in names}
                for node_id in {number for numbers in revoked.values() for number in numbers}:
                    client.UnregisterNode(UnregisterNodeRequest(node_id=node_id))
        finally:
            client.close()
    except click.ClickException as error:
        raise PerfedError(f"SuperLink: {' '.join(error.format_message().split())}") from None
    return {name: len(numbers) for name, numbers in revoked.items()}


def main(words: Sequence[str]) -> None:
    """Revoke the keys of the sites named after the connection and print the outcome; exit with code 1 on failure."""
    try:
        for name, count in revoke_keys(words[0], words[1:]).items():
            print(f"{name}: its key is barred" if count else f"{name}: no key of it was known")
    except PerfedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])

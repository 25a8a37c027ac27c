"""``python -m perfed.sites.flower.revoke_keys CONNECTION NAME ...``: the SuperLink bars all keys of these sites.

Flower's own command asks for a SuperNode's number, and none of its commands tells a number's name.
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
    raise PerfedError(f"the installed flwr lacks what barring a key needs of it: {error}") from None


def bar(connection: str, names: Sequence[str]) -> dict[str, int]:
    """Unregister every key of these sites at the SuperLink; how many keys each had.

    Raises:
        PerfedError: the SuperLink does not answer, or refuses.
    """
    try:
        client = init_http_client_from_connection(read_superlink_connection(connection))
        try:
            with flwr_cli_exc_handler():
                known = [node for node in client.ListNodes(ListNodesRequest()).nodes_info if not node.unregistered_at]
                barred = {name: [node.node_id for node in known if node.name == name] for name in names}
                for node_id in {number for numbers in barred.values() for number in numbers}:
                    client.UnregisterNode(UnregisterNodeRequest(node_id=node_id))
        finally:
            client.close()
    except click.ClickException as error:
        raise PerfedError(f"SuperLink: {' '.join(error.format_message().split())}") from None
    return {name: len(numbers) for name, numbers in barred.items()}


def main(words: Sequence[str]) -> None:
    """Bar the keys of the sites that are named behind the connection, and say so; a failure ends with code 1."""
    try:
        for name, count in bar(words[0], words[1:]).items():
            print(f"{name}: its key is barred" if count else f"{name}: no key of it was known")
    except PerfedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])

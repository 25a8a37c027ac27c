"""Sums under masks against a server, or a site, that does not follow the protocol: no reply of a single site leaves."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engines import blobs, leaves, make, serve, train
from in_process_sites import Sites

from perfed.engine.secure_aggregation import SecureAggregation
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.participation.settings import Participation
from perfed.sites.flower.masking import encode_context
from perfed.sites.flower.masks import Member, MemberKeys, recover_secrets, unmask_sum
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.refusal import RefusalReason
from perfed.sites.flower.signing import SigningKey
from perfed.sites.flower.wire import hash_common_request, hash_payload
from perfed.tree import map_leaves

Request = tuple[dict[str, Any], dict[str, Any]]


def signing_keys(names: Iterable[str]) -> dict[str, SigningKey]:
    return {name: SigningKey(name.encode().ljust(32, b"-")) for name in names}


def signed(names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of sites that know each other's keys."""
    keys = signing_keys(names)
    secure = SecureAggregation(keys={name: key.public_key for name, key in keys.items()})
    return {"secure": secure, "signers": keys}


def with_header(request: Request, **fields: Any) -> Request:
    return {**request[0], **fields}, request[1]


class Server:
    """A server that asks for whatever sums it likes; ``requests`` are those of an honest run."""

    def __init__(self, path, count: int, rounds: int = 1, method: Method | None = None, **options: Any) -> None:
        federation, method = blobs(tuple(range(5, 5 + count)), dims=(4,)), method or make("fedavg")
        self.names = federation.ids
        options = {"secure": SecureAggregation(), **options}
        honest = Sites(path / "honest", method, federation, **options)
        train(honest.server, rounds)
        works = [(site, unpack(message)) for site, message in honest.transport.sent]
        self.requests: dict[str, Request] = {}
        for site, (header, tree) in works:
            if header.pop("secure", None) and header["round"] == 1:
                self.requests[site] = header, tree
        self.request = next(iter(self.requests.values()))
        honest.close()
        self._again = lambda run: Sites(path / "attacked", method, federation, run=run, **options)
        self.sites = self._again("run")
        self.plain = Sites(path / "plain", method, federation)  # what each site would reply without masks
        self.attempts = 0

    def restart_sites(self, run: str = "run") -> None:
        self.sites.close()
        self.sites = self._again(run)

    def ask(self, site: str, header: Mapping[str, Any], tree: Any = None) -> dict[str, Any]:
        return self.tell(site, header, tree)[0]

    def tell(self, site: str, header: Mapping[str, Any], tree: Any = None) -> tuple[dict[str, Any], Any]:
        return unpack(self.sites.transport.at[site].answer(pack(dict(header), tree or {})))

    def masked(
        self,
        names: Sequence[str],
        requests: Mapping[str, Request],
        asked: Sequence[str] | None = None,
        withheld: Mapping[str, Collection[str]] | None = None,
        bases: Mapping[str, int] | None = None,
        shown: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda reader, fields: fields,
    ) -> Sum:
        """Begin a sum of ``names``, as far as the masked replies; sites that refuse have dropped out.

        ``withheld``: members whose sealed shares do not reach a site. ``bases``: exchanges whose states sites are told
        to start from when they make their keys, where the request says another one. ``shown``: what a site is shown of
        the keys of another.
        """
        self.attempts += 1
        attempt = f"attempt {self.attempts}"
        asked = sorted(asked or names)
        return Sum(self, sorted(names), dict(requests), asked, attempt, withheld or {}, bases or {}, shown)


class Sum:
    """An attempt at a sum."""

    def __init__(
        self,
        server: Server,
        names: list[str],
        requests: dict[str, Request],
        asked: list[str],
        attempt: str,
        withheld: Mapping[str, Collection[str]],
        bases: Mapping[str, int],
        shown: Callable[[str, dict[str, Any]], dict[str, Any]],
    ) -> None:
        self.server, self.refused = server, dict[str, PerfedError]()
        header, self.numbers = requests[names[0]][0], {name: n for n, name in enumerate(names, start=1)}
        fields = {"run": header["run"], "sequence": header["sequence"], "attempt": attempt}
        self.fields, hashes = fields, {name: hash_common_request(*requests[name]) for name in names}
        self.context = encode_context(header["run"], header["sequence"], attempt, hashes[names[0]], asked)
        payloads = {name: hash_payload(*requests[name]) for name in names}
        wanted = {
            n: {
                **{"kind": "keys", **fields, "asked": asked, "request": hashes[n], "payload": payloads[n]},
                "base": bases.get(n, requests[n][0]["base"]),
            }
            for n in names
        }
        keys = {n: reply["keys"] for n, reply in self.ask(wanted).items()}
        self.keys = {str(self.numbers[name]): of for name, of in keys.items()}
        shares = {
            n: {
                **{"kind": "shares", **fields, "number": self.numbers[n]},
                "keys": {number: shown(n, of) for number, of in self.keys.items()},
            }
            for n in keys
        }
        self.sealed = {n: reply["sealed"] for n, reply in self.ask(shares).items()}
        self.vectors: dict[str, np.ndarray] = {}
        for name in self.sealed:
            number = str(self.numbers[name])
            others = self.sealed.keys() - {name, *withheld.get(name, ())}
            mine = {str(self.numbers[other]): self.sealed[other][number] for other in others}
            work = {**requests[name][0], "secure": {"attempt": attempt, "sealed": mine}}
            try:
                tree = server.tell(name, work, requests[name][1])[1]
                self.vectors[name] = tree["masked"].numpy().view(np.uint64)
            except PerfedError as error:
                self.refused[name] = error

    def ask(self, messages: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        replies = {}
        for name, message in messages.items():
            try:
                replies[name] = self.server.ask(name, message)
            except PerfedError as error:
                self.refused[name] = error
        return replies

    def opened(
        self,
        arrived: Collection[str],
        helpers: Collection[str],
        *,
        confirmed: bool = False,
        wanted: Collection[str] | None = None,
    ) -> np.ndarray | None:
        """Return the sum of those who are said to have arrived; ``None`` where too few help to open it.

        ``confirmed``: whether the helpers are asked to sign whose replies are in it. ``wanted``: the sites whose
        vectors the server adds; all that have arrived if not given.
        """
        members = {self.numbers[name] for name in arrived}
        fields = {**self.fields, "arrived": sorted(members)}
        if confirmed:
            replies = self.ask({name: {"kind": "confirm", **fields} for name in helpers})
            fields["confirmations"] = {str(self.numbers[name]): of["confirmation"] for name, of in replies.items()}
        message = {"kind": "unmask", **fields}
        replies = self.ask(dict.fromkeys(helpers, message))
        shares = {
            self.numbers[name]: {int(n): bytes.fromhex(text) for n, text in reply["shares"].items()}
            for name, reply in replies.items()
        }
        keys = {int(number): MemberKeys.from_fields(of) for number, of in self.keys.items()}
        needed = len(self.numbers) // 2 + 1
        if len(shares) < needed:
            return None
        sharers = {self.numbers[name]: keys[self.numbers[name]] for name in self.sealed}
        recovery = recover_secrets(needed, sharers, members, shares)
        vectors = {self.numbers[name]: self.vectors[name] for name in wanted or arrived}
        secrets = {n: secret for n, secret in recovery.secrets.items() if n in vectors or n not in members}
        return unmask_sum(self.context, keys, vectors, secrets)


def isolated(sums: Sequence[Collection[str]], names: Sequence[str]) -> list[str]:
    """Return the sites whose reply is a linear combination of the sums."""
    if not sums:
        return []
    matrix = np.array([[float(name in members) for name in names] for members in sums])
    rank = np.linalg.matrix_rank(matrix)
    unit = dict(zip(names, np.eye(len(names)), strict=True))
    return [name for name in names if np.linalg.matrix_rank([*matrix, unit[name]]) == rank]


def test_the_helper_finds_isolated_sites():
    assert isolated([("a", "b"), ("b",)], "abc") == ["a", "b"]
    assert isolated([("a", "b"), ("b", "c"), ("a", "c")], "abc") == ["a", "b", "c"]
    assert isolated([("a", "b"), ("b", "c")], "abc") == []


FIVE = ("01357", "12457", "02457", "01234", "23457")


@pytest.mark.long
@pytest.mark.parametrize("rounds", [1, 5])
def test_five_overlapping_sums_do_not_reveal_a_reply(rounds, tmp_path):
    """Of 17 sites five are asked. The server asks for five sums of one payload, in one exchange or in five rounds."""
    server = Server(tmp_path, 17, participation=Participation(rate=5 / 17))
    sets = [[server.names[int(digit)] for digit in digits] for digits in FIVE]
    assert server.names[0] in isolated(sets, server.names)
    sums = []
    for number, members in enumerate(sets):
        round_ = 1 + number % rounds
        request = with_header(server.request, sequence=10_000 * round_ + 1, round=round_, base=0)
        going = server.masked(members, dict.fromkeys(members, request))
        arrived = sorted(going.vectors)
        if len(arrived) >= 3 and going.opened(arrived, arrived) is not None:
            sums.append(arrived)
        assert {error.reason for error in going.refused.values()} <= {RefusalReason.SUM}
    assert sums == [sorted(sets[0])]


@pytest.mark.long
@pytest.mark.parametrize("sequences", [(10_001,), (10_001, 20_001, 30_001)])
@pytest.mark.parametrize(("count", "asked"), [(7, 3), (5, 5)])
def test_no_combination_of_opened_sums_of_one_payload_isolates_a_site(count, asked, sequences, tmp_path):
    """A server that asks for sums at random, claims drop-outs, and repeats the payload in other rounds."""
    server = Server(tmp_path, count, participation=Participation(rate=asked / count))
    generator, sums, needed = np.random.default_rng(count), [], asked // 2 + 1
    for attempt in range(12):
        request = with_header(server.request, sequence=sequences[attempt % len(sequences)], base=0)
        request[0]["round"] = request[0]["sequence"] // 10_000
        members = generator.choice(server.names, asked, replace=False).tolist()
        going = server.masked(members, dict.fromkeys(members, request))
        if len(going.vectors) < needed:
            continue
        arrived = generator.permutation(sorted(going.vectors))[: generator.integers(needed, len(going.vectors) + 1)]
        helpers = generator.permutation(arrived)[:needed]
        if going.opened(arrived.tolist(), helpers.tolist()) is not None:
            sums.append(sorted(arrived.tolist()))
        if attempt % 4 == 3:
            server.restart_sites()
    assert sums and not isolated(sums, server.names)


@pytest.mark.long
def test_a_payload_that_is_repeated_with_a_claimed_drop_out_does_not_reveal_a_reply(tmp_path):
    server = Server(tmp_path, 4)
    first = server.masked(server.names, dict.fromkeys(server.names, server.request))
    assert first.opened(server.names, server.names[:3]) is not None
    request = with_header(server.request, sequence=20_001, round=2, base=0)
    second = server.masked(server.names, dict.fromkeys(server.names, request))
    assert second.opened(server.names[1:], server.names[1:]) is None
    assert "an opened sum of the same payload" in str(second.refused[server.names[1]])
    request = with_header(server.request, sequence=30_001, round=3, base=0)
    again = server.masked(server.names, dict.fromkeys(server.names, request))
    assert again.opened(server.names, server.names) is not None  # of the same sites, which tells nothing new


def other_arrivals(server: Server, *, confirmed: bool) -> np.ndarray | None:
    """Open a sum of two of five sites: tell each helper of three arrivals, others to each."""
    going = server.masked(server.names, dict.fromkeys(server.names, server.request))
    lists = [[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 2, 5]]
    replies = {}
    for name, arrived in zip(server.names, lists, strict=True):
        fields = {**going.fields, "arrived": arrived}
        if confirmed:
            signed = {str(going.numbers[name]): server.ask(name, {"kind": "confirm", **fields})["confirmation"]}
            fields["confirmations"] = dict.fromkeys("12345", *signed.values())
        replies |= going.ask({name: {"kind": "unmask", **fields}})
    if not replies:
        assert {error.reason for error in going.refused.values()} == {RefusalReason.SUM}
        return None
    shares = {
        going.numbers[name]: {int(n): bytes.fromhex(text) for n, text in reply["shares"].items()}
        for name, reply in replies.items()
    }
    keys = {int(number): MemberKeys.from_fields(of) for number, of in going.keys.items()}
    of_arrived = {n: {m: t for m, t in of.items() if m in lists[n - 1]} for n, of in shares.items()}
    of_others = {n: {m: t for m, t in of.items() if m not in lists[n - 1]} for n, of in shares.items()}
    first = recover_secrets(3, {n: keys[n] for n in (1, 2)}, [1, 2], of_arrived)
    rest = recover_secrets(3, {n: keys[n] for n in (3, 4, 5)}, [], of_others)
    vectors = {n: going.vectors[server.names[n - 1]] for n in (1, 2)}
    return unmask_sum(going.context, keys, vectors, {**first.secrets, **rest.secrets})


@pytest.mark.long
def test_a_sum_of_fewer_than_the_threshold_is_opened_only_where_sites_cannot_check_keys(tmp_path):
    """Each helper is told of three arrivals; two sites are in all lists, and every other one in two at most."""
    names = ["c0", "c1", "c2", "c3", "c4"]
    read = other_arrivals(Server(tmp_path / "without", 5), confirmed=False)
    assert read is not None and np.abs(read.view(np.int64)).max() < 2**40  # the docs say so
    assert other_arrivals(Server(tmp_path / "with", 5, **signed(names)), confirmed=True) is None


@pytest.mark.long
def test_a_server_that_withholds_sealed_shares_from_one_site_does_not_reveal_its_reply(tmp_path):
    """The masks of c0 would be with c1 and c2 only, of whom the server says to the others that they dropped out."""
    server = Server(tmp_path, 5, **signed(["c0", "c1", "c2", "c3", "c4"]))
    going = server.masked(server.names, dict.fromkeys(server.names, server.request), withheld={"c0": ("c3", "c4")})
    if "c0" in going.vectors:
        read = going.opened(["c0", "c3", "c4"], ["c1", "c3", "c4"], confirmed=True, wanted=["c0"])
        assert read is None or np.abs(read.view(np.int64)).max() > 2**40
    assert "shares of [4, 5] are missing" in str(going.refused["c0"])


@pytest.mark.long
def test_a_server_that_is_killed_while_confirmed_sums_are_opened_goes_on(tmp_path):
    federation = blobs((12, 7, 5), dims=(4,))
    sites = Sites(tmp_path, make("fedavg"), federation, **signed(federation.ids))
    sites.kill_server("unmask", replies=1)
    sites.transport.silent = {"c2"}  # so that the site that has opened the sum already is needed
    assert sites.server.round(1).participants == federation.ids


@pytest.mark.long
def test_a_second_run_of_the_study_does_not_reveal_a_reply(tmp_path):
    """Its payloads are the same, and a site agrees to a study and not to each of its runs."""
    server = Server(tmp_path, 4)
    first = server.masked(server.names, dict.fromkeys(server.names, server.request))
    assert first.opened(server.names, server.names[:3]) is not None
    server.restart_sites("another")
    request = with_header(server.request, run="another")
    second = server.masked(server.names, dict.fromkeys(server.names, request))
    assert second.opened(server.names[1:], server.names[1:]) is None
    assert {*second.refused} == {"c1", "c2"}  # which have helped to open the first sum
    third = server.masked(server.names[1:], dict.fromkeys(server.names, request))
    assert {*third.refused} == {"c1", "c2", "c3"}


@pytest.mark.long
@pytest.mark.parametrize("run", ["run", "another"])
def test_a_site_without_the_notes_on_its_sums_takes_part_in_no_sum(run, tmp_path):
    """They are in a folder beside those of the runs, which somebody may take for one that is over."""
    server = Server(tmp_path, 4)
    first = server.masked(server.names, dict.fromkeys(server.names, server.request))
    assert first.opened(server.names, server.names[:3]) is not None
    server.restart_sites(run)
    shutil.rmtree(tmp_path / "attacked" / "c1" / ".sums")
    with pytest.raises(PerfedError, match=r"\.sums is missing, .* and run 'run' has put replies under masks"):
        server.restart_sites(run)


@pytest.mark.parametrize("lost", [True, False])
def test_a_site_whose_folder_was_lost_helps_to_open_a_second_sum_of_a_payload(lost, tmp_path):
    """Nobody can notice it; the docs say that such a site counts as one that colludes with the server."""
    names = ["c0", "c1", "c2", "c3", "c4"]
    server = Server(tmp_path, 5, **signed(names))
    first = server.masked(names, dict.fromkeys(names, server.request))
    all_but_c4 = first.opened(names[:4], names[2:], confirmed=True)
    if lost:
        shutil.rmtree(tmp_path / "attacked" / "c4")
    server.restart_sites()
    request = with_header(server.request, sequence=20_001, round=2, base=0)
    second = server.masked(names, dict.fromkeys(names, request))
    others = second.opened(names[:3], ["c0", "c1", "c4"], confirmed=True)
    assert all_but_c4 is not None
    if not lost:
        assert others is None
        return
    reply = unpack(server.plain.transport.at["c3"].answer(pack(*server.requests["c3"])))[1]
    learned = float((all_but_c4 - others).view(np.int64)[0]) / 2**24  # the loss is the first term
    assert learned == pytest.approx(float(reply["loss"]), abs=1e-6)


@pytest.mark.parametrize("count", [3, 5])
def test_a_study_of_other_sites_than_the_keys_are_of_is_refused(count, tmp_path):
    """A server may change the names and number of sites in a study; a sum of two is less than was agreed to."""
    names = ["c0", "c1", "c2", "c3", "c4"]
    options = {**signed(names[:count]), "signers": signing_keys(names)}
    said = rf"the server's study has 4 sites, and secure_aggregation.keys lists {count}"
    with pytest.raises(PerfedError, match=said):
        Sites(tmp_path, make("fedavg"), blobs((5, 6, 7, 8), dims=(4,)), **options)


@pytest.mark.long
def test_a_restarted_site_remembers_which_sites_were_asked(tmp_path):
    server = Server(tmp_path, 7, participation=Participation(rate=3 / 7))
    requests = dict.fromkeys(server.names, server.request)
    assert not server.masked(server.names[:3], requests).refused
    server.restart_sites()
    assert not server.masked(server.names[:3], requests).refused  # a server that goes on asks the same sites
    other = server.masked(server.names[2:5], requests)
    assert [*other.refused] == [server.names[2]]
    assert "for which these sites were asked: ['c0', 'c1', 'c2']" in str(other.refused[server.names[2]])


def swapped(server: Server, victim: str) -> tuple[PerfedError | None, np.ndarray | None]:
    """Let the server play all members but ``victim``, with keys of its own; return what it reads."""
    names, request = sorted(server.names), server.request
    number, fields = names.index(victim) + 1, {"run": "run", "sequence": request[0]["sequence"], "attempt": "swapped"}
    digest, payload = hash_common_request(*request), hash_payload(*request)
    context = encode_context("run", fields["sequence"], "swapped", digest, names)
    try:
        hashes = {"request": digest, "payload": payload}
        reply = server.ask(victim, {"kind": "keys", **fields, **hashes, "asked": names, "base": request[0]["base"]})
        played = {n: Member(context, 3, name) for n, name in enumerate(names, start=1) if name != victim}
        keys = {number: MemberKeys.from_fields(reply["keys"]), **{n: member.keys for n, member in played.items()}}
        plain = {str(n): of.to_fields() for n, of in keys.items()}
        sealed = server.ask(victim, {"kind": "shares", **fields, "number": number, "keys": plain})["sealed"]
        shares = {n: member.share_secrets(n, keys) for n, member in played.items()}
        for_victim = {str(n): of[number].hex() for n, of in shares.items()}
        secure = {"attempt": "swapped", "sealed": for_victim}
        tree = server.tell(victim, {**request[0], "secure": secure}, request[1])[1]
    except PerfedError as error:
        return error, None
    vectors = {number: tree["masked"].numpy().view(np.uint64)}
    for n, member in played.items():
        to = {m: of[n] for m, of in shares.items() if m != n} | {number: bytes.fromhex(sealed[str(n)])}
        vectors[n] = member.mask_values(np.zeros_like(vectors[number]), to)
    given = {n: member.reveal_shares(vectors) for n, member in played.items()}
    recovery = recover_secrets(3, keys, vectors, given)
    return None, unmask_sum(context, keys, vectors, recovery.secrets)


@pytest.mark.long
def test_a_server_with_keys_of_its_own_reads_a_reply_unless_the_study_has_the_keys_of_the_sites(tmp_path):
    """Without the keys masks protect only against a server that follows the protocol, as docs/privacy.md says."""
    server = Server(tmp_path / "without", 4)
    error, read = swapped(server, "c2")
    assert error is None and read is not None and np.abs(read.view(np.int64)).max() < 2**40  # no mask is left
    server = Server(tmp_path / "with", 4, **signed(["c0", "c1", "c2", "c3"]))
    error, read = swapped(server, "c2")
    assert read is None and error is not None and error.reason == RefusalReason.SUM
    assert "are not signed with its key in secure_aggregation.keys" in str(error)


@pytest.mark.long
def test_sites_that_know_each_others_keys_end_where_a_simulation_ends(tmp_path):
    federation = blobs((12, 7, 5), dims=(4,))
    sites = Sites(tmp_path, make("fedavg"), federation, **signed(federation.ids))
    train(sites.server, 2)
    simulated = train(serve(make("fedavg"), federation, engine="sequential", secure=SecureAggregation()), 2)
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(leaves(sites.server.state.tree()), leaves(simulated.state.tree()), strict=True)
    )


@pytest.mark.long
@pytest.mark.parametrize("signer", [None, "c1"])
def test_a_site_whose_key_is_not_that_of_the_study_does_not_begin(signer, tmp_path):
    federation = blobs((12, 7, 5), dims=(4,))
    options = signed(federation.ids)
    signers = {**options["signers"], "c0": options["signers"].get(signer)}
    with pytest.raises(PerfedError, match=r"secure_aggregation.keys.c0 of the study is .*'perfed site key'") as error:
        Sites(tmp_path, make("fedavg"), federation, secure=options["secure"], signers=signers)
    assert error.value.reason == RefusalReason.SUM


@pytest.mark.long
@pytest.mark.parametrize("keys", [True, False])
def test_other_models_for_other_sites_make_the_sum_fail(keys, tmp_path):
    """The server tells each site the hash of what it sends to it."""
    names = ["c0", "c1", "c2", "c3"]
    server = Server(tmp_path, 4, **(signed(names) if keys else {}))
    header, tree = server.request
    other = header, {**tree, "shared": map_leaves(tree["shared"], lambda _, tensor: tensor + 1)}
    going = server.masked(names, {name: other if name == "c0" else server.request for name in names})
    assert len(going.vectors) < 3 and {error.reason for error in going.refused.values()} == {RefusalReason.SUM}
    assert "c0" in going.refused or "c0" not in going.vectors


@pytest.mark.long
def test_a_site_refuses_another_model_than_the_one_that_its_keys_were_made_for(tmp_path):
    server = Server(tmp_path, 4)
    going = server.masked(server.names, dict.fromkeys(server.names, server.request))
    header, tree = server.request
    other = {**tree, "shared": map_leaves(tree["shared"], lambda _, tensor: tensor + 1)}
    number = str(going.numbers["c0"])
    mine = {str(going.numbers[n]): of[number] for n, of in going.sealed.items() if n != "c0"}
    with pytest.raises(PerfedError, match="not the one for which the sites created their keys") as error:
        server.tell("c0", {**header, "secure": {"attempt": going.fields["attempt"], "sealed": mine}}, other)
    assert error.value.reason == RefusalReason.SUM


class Liar:
    """A site whose shares are wrong."""

    def __init__(self, site: Any) -> None:
        self._site = site

    def answer(self, data: bytes) -> bytes:
        header, tree = unpack(self._site.answer(data))
        if header["kind"] == "unmask":
            shares = {n: text[:-32] + bytes(16).hex() for n, text in header["shares"].items()}
            return pack({**header, "shares": shares}, tree)
        return pack(header, tree)


class LowOrder(Liar):
    """A site with whose keys no other site can share a secret."""

    def answer(self, data: bytes) -> bytes:
        header, tree = unpack(self._site.answer(data))
        if header["kind"] == "keys":
            header["keys"]["keys"] = bytes(32).hex() + header["keys"]["keys"][64:]
        return pack(header, tree)


@pytest.mark.long
def test_a_site_with_keys_of_low_order_is_left_out_and_the_others_go_on(tmp_path):
    federation = blobs((12, 7, 5, 9), dims=(4,))
    sites = Sites(tmp_path, make("fedavg"), federation, secure=SecureAggregation(threshold=3))
    sites.server.prepare()
    sites.transport.at["c1"] = LowOrder(sites.transport.at["c1"])
    assert sites.server.round(1).participants == ["c0", "c2", "c3"]


@pytest.mark.long
def test_a_site_that_gives_wrong_shares_is_named_and_the_sum_is_opened_without_them(tmp_path):
    federation, notes = blobs((12, 7, 5, 9), dims=(4,)), list[str]()
    sites = Sites(tmp_path, make("fedavg"), federation, secure=SecureAggregation(threshold=3))
    sites.server.prepare()
    sites.transport.note = notes.append
    sites.transport.at["c1"] = Liar(sites.transport.at["c1"])
    assert sites.server.round(1).participants == federation.ids
    simulated = train(serve(make("fedavg"), federation, engine="sequential", secure=SecureAggregation()), 1)
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(leaves(sites.server.state.tree()), leaves(simulated.state.tree()), strict=True)
    )
    (note,) = notes
    assert note.startswith("round 1: site 'c1' gave wrong shares of the secrets of c0, c1, c2 and 1 more; the sum was")


@pytest.mark.long
def test_where_too_few_shares_are_left_the_message_blames_nobody(tmp_path):
    federation, notes = blobs((12, 7, 5), dims=(4,)), list[str]()
    sites = Sites(tmp_path, make("fedavg"), federation, secure=SecureAggregation(threshold=3))
    sites.server.prepare()
    sites.transport.note = notes.append
    sites.transport.at["c1"] = Liar(sites.transport.at["c1"])
    assert sites.server.round(1).participants == []
    assert "do not fit together, and there are too few shares to find the wrong ones" in notes[0]
    assert "c1' gave" not in notes[0]


@pytest.mark.long
def test_a_sum_that_was_opened_without_wrong_shares_goes_on_to_the_same_bits(tmp_path):
    """The server is killed after it has opened the sum, and reads the shares from its journal."""
    federation = blobs((12, 7, 5, 9), dims=(4,))
    sites = Sites(tmp_path, make("fedavg"), federation, secure=SecureAggregation(threshold=3))
    sites.transport.at["c1"] = Liar(sites.transport.at["c1"])
    train(sites.server, 1)
    before = [tensor.clone() for _, tensor in leaves(sites.server.state.tree())]
    sites.close()
    again = Sites(tmp_path, make("fedavg"), federation, secure=SecureAggregation(threshold=3))
    train(again.server, 1)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, leaves(again.server.state.tree()), strict=True))


WHOLE = 50  # a mini-batch of all rows of a site


def sum_again(
    server: Server,
    later: Mapping[str, int],
    *,
    change: float = 0.0,
    confirmed: bool = False,
    shown: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda reader, fields: fields,
) -> float | None:
    """Return by how much the loss in two sums of all sites differs; ``None`` where no second sum is opened.

    Args:
        server: whose sites have not replied yet.
        later: the exchange whose state each site starts from in the second sum, which is of round 2.
        change: what is added to each number of the second payload.
        confirmed: whether sites sign whose replies are in a sum.
        shown: what a site is shown of the keys of another in the second sum.
    """
    names = server.names
    first = server.masked(names, dict.fromkeys(names, server.request))
    before = first.opened(names, names, confirmed=confirmed)
    assert before is not None
    going = server.masked(names, second_requests(server, later, change), shown=shown)
    if going.vectors.keys() < {*names}:
        assert {error.reason for error in going.refused.values()} == {RefusalReason.SUM}
        return None
    after = going.opened(names, names, confirmed=confirmed)
    return None if after is None else float((after - before).view(np.int64)[0]) / 2**24  # the loss is the first term


def second_requests(server: Server, later: Mapping[str, int], change: float = 0.0) -> dict[str, Request]:
    header, tree = server.request
    other = {**tree, "shared": map_leaves(tree["shared"], lambda _, tensor: tensor + change)}
    return {name: ({**header, "sequence": 20_001, "round": 2, "base": base}, other) for name, base in later.items()}


def difference_without_masks(server: Server, later: Mapping[str, int], change: float = 0.0) -> dict[str, float]:
    """Return by how much the loss in two replies of each site differs, from sites that reply without masks."""
    differences = {}
    for name, (header, tree) in second_requests(server, later, change).items():
        site = server.plain.transport.at[name]
        first, second = (unpack(site.answer(pack(*message)))[1] for message in (server.request, (header, tree)))
        differences[name] = float(second["loss"] - first["loss"])
    return differences


@pytest.mark.long
@pytest.mark.parametrize("with_keys", [True, False])
def test_a_site_that_starts_from_another_state_is_not_isolated_by_two_sums_of_one_payload(with_keys, tmp_path):
    """The personal head of c1 has been trained before the second sum, and those of the others have not."""
    names = ["c0", "c1", "c2", "c3"]
    server = Server(tmp_path, 4, method=make("fedrep", batch_size=WHOLE), **(signed(names) if with_keys else {}))
    later = {"c0": 0, "c1": 10_001, "c2": 0, "c3": 0}
    differences = difference_without_masks(server, later)
    assert [name for name, difference in differences.items() if abs(difference) > 1e-12] == ["c1"]
    learned = sum_again(server, later, confirmed=with_keys)
    assert learned is None  # the loss of c1, and every other number of its reply


@pytest.mark.long
@pytest.mark.parametrize("moved", ["c1", "c0 c2 c3", "c0 c1"])
def test_some_sites_of_a_sum_cannot_start_from_another_state(moved, tmp_path):
    server = Server(tmp_path, 4, method=make("fedrep", batch_size=WHOLE))
    later = {name: 10_001 if name in moved.split() else 0 for name in server.names}
    assert sum_again(server, later) is None


@pytest.mark.long
def test_all_sites_may_start_from_another_state(tmp_path):
    """A method may send the same payload in every round; the difference is a sum over all sites, too."""
    server = Server(tmp_path, 4, method=make("fedrep", batch_size=WHOLE))
    later = dict.fromkeys(server.names, 10_001)
    expected = sum(difference_without_masks(server, later).values())
    assert sum_again(server, later) == pytest.approx(expected, abs=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("all_sites", [True, False])
def test_where_every_sum_is_of_all_sites_no_payload_isolates_one_that_starts_from_another_state(all_sites, tmp_path):
    """The second payload differs by so little that the other sites reply nearly the same."""
    secure = SecureAggregation(threshold=4 if all_sites else 3)
    server = Server(tmp_path, 4, method=make("fedrep", batch_size=WHOLE), secure=secure)
    later, change = {"c0": 0, "c1": 10_001, "c2": 0, "c3": 0}, 1e-9
    expected = difference_without_masks(server, later, change)["c1"]
    learned = sum_again(server, later, change=change)
    assert (learned is None) if all_sites else (learned == pytest.approx(expected, abs=1e-5))  # the docs say so


@pytest.mark.long
@pytest.mark.parametrize("base", [0, 10_001])
def test_a_payload_that_is_repeated_in_another_round_gets_the_same_replies(base, tmp_path):
    """Only c3 has more than one mini-batch, in another order each round; states of FedAvg hold no numbers."""
    server = Server(tmp_path, 4, method=make("fedavg", batch_size=7))
    later = dict.fromkeys(server.names, base)
    assert [name for name, by in difference_without_masks(server, later).items() if abs(by) > 1e-12] == ["c3"]
    assert sum_again(server, later) == 0


@pytest.mark.long
def test_a_site_starts_from_the_state_that_its_keys_were_made_for(tmp_path):
    server = Server(tmp_path, 4, method=make("fedrep"))
    names = server.names
    server.masked(names, dict.fromkeys(names, server.request)).opened(names, names)
    requests = second_requests(server, {name: 10_001 if name == "c1" else 0 for name in names})
    going = server.masked(names, requests, bases={"c1": 0})
    assert going.vectors.keys() == {*names} - {"c1"}
    assert "starts from exchange 10001, and its keys were created for 0" in str(going.refused["c1"])


@pytest.mark.long
@pytest.mark.parametrize("with_keys", [True, False])
def test_a_server_cannot_show_a_site_another_history_of_another(with_keys, tmp_path):
    """Without signatures the masks of c1 and the others do not cancel, for all keys depend on the histories."""
    names = ["c0", "c1", "c2", "c3"]
    server = Server(tmp_path, 4, method=make("fedrep", batch_size=WHOLE), **(signed(names) if with_keys else {}))
    later = {"c0": 0, "c1": 10_001, "c2": 0, "c3": 0}
    hide = lambda reader, fields: {**fields, "history": ""} if fields["site"] == "c1" != reader else fields  # noqa: E731
    assert sum_again(server, later, confirmed=with_keys, shown=hide) is None

"""The protocol of secure aggregation, phase by phase, with nobody in between."""

from __future__ import annotations

import hashlib
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from perfed.errors import PerfedError
from perfed.sites.flower.masks import Member, recover_secrets, unmask_sum

SUM = b"run 10001 attempt"
PHASES = ["keys", "shares", "masked", "unmask"]


def opened(needed: int, held: Round, shares: Any) -> np.ndarray:
    recovery = recover_secrets(needed, held.shared, held.arrived, shares)
    if recovery.lacking:
        raise PerfedError(f"the shares of member {recovery.lacking[0]} are wrong")
    return unmask_sum(SUM, held.keys, held.arrived, recovery.secrets)


class Round:
    """Members 1 to n with numbers of their own; each may be gone from some phase on."""

    def __init__(self, count: int, needed: int, gone: dict[int, str] | None = None, values: Any = None) -> None:
        generator = np.random.default_rng(count)
        self.needed, self.gone = needed, gone or {}
        drawn = {n: generator.integers(0, 2**64, 7, np.uint64) for n in range(1, count + 1)}
        self.values = drawn if values is None else dict.fromkeys(drawn, values)
        self.at = {n: Member(SUM, needed) for n in self.values}
        self.keys = {n: member.keys for n, member in self.there("keys").items()}
        sealed = {n: member.share_secrets(n, self.keys) for n, member in self.there("shares").items()}
        if sealed.keys() != self.keys.keys():  # the server begins again with the rest
            self.at = {n: Member(SUM, needed) for n in sealed}
            self.keys = {n: member.keys for n, member in self.at.items()}
            sealed = {n: member.share_secrets(n, self.keys) for n, member in self.at.items()}
        self.shared = {n: self.keys[n] for n in sealed}
        self.to = {n: {other: of[n] for other, of in sealed.items() if other != n} for n in sealed}
        self.arrived = {n: m.mask_values(self.values[n], self.to[n]) for n, m in self.there("masked").items()}

    def there(self, phase: str) -> dict[int, Member]:
        late = PHASES[: PHASES.index(phase) + 1]
        return {n: member for n, member in self.at.items() if self.gone.get(n) not in late}

    def sum(self) -> np.ndarray:
        shares = {n: m.reveal_shares(self.arrived) for n, m in self.there("unmask").items() if n in self.arrived}
        return opened(self.needed, self, shares)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("who", [(2,), (1, 5)])
def test_the_sum_is_that_of_all_whose_numbers_have_arrived_whoever_drops_out(phase, who):
    held = Round(5, 3, dict.fromkeys(who, phase))
    put_in = [n for n in held.values if n not in who or phase == "unmask"]
    expected = [sum(int(held.values[n][i]) for n in put_in) % 2**64 for i in range(7)]  # Python's own numbers
    assert held.sum().tolist() == expected
    assert sorted(held.arrived) == put_in


def test_members_may_drop_out_in_every_phase_of_one_sum():
    held = Round(7, 4, {1: "keys", 4: "shares", 7: "masked"})
    assert (held.sum() == sum(held.values[n] for n in (2, 3, 5, 6))).all()


@pytest.mark.parametrize("phase", PHASES)
def test_with_fewer_than_are_needed_there_is_no_sum(phase):
    with pytest.raises(PerfedError, match=r"needed|a sum needs 3|gave their shares"):
        Round(5, 3, dict.fromkeys((1, 2, 4), phase)).sum()


def uniform(numbers: np.ndarray) -> float:
    """p-value of the chi-square test that all bytes are equally frequent."""
    return float(chisquare(np.bincount(numbers.view(np.uint8), minlength=256)).pvalue)


def test_what_one_member_sends_looks_uniform_whatever_it_puts_in():
    """Its numbers are zeros, whose bytes are all the same; over 2.4 million bytes."""
    sent = list(Round(3, 2, values=np.zeros(100_000, np.uint64)).arrived.values())
    assert all(uniform(of) > 1e-4 for of in sent)
    assert uniform(np.zeros(100_000, np.uint64)) < 1e-4  # the test can fail
    assert not any((one == other).any() for one, other in combinations(sent, 2))


def test_fewer_members_than_are_needed_open_nothing_with_the_server():
    """Neither as the protocol asks, nor by taking their shares for enough."""
    held = Round(5, 3)
    shares = {n: held.at[n].reveal_shares(held.arrived) for n in (1, 2)}
    with pytest.raises(PerfedError, match="2 of 5 gave their shares, and a sum needs 3"):
        opened(3, held, shares)
    with pytest.raises(PerfedError, match="wrong"):
        opened(2, held, shares)


@pytest.mark.long
def test_shares_below_the_threshold_do_not_depend_on_the_secret():
    """Of two secrets, 300 times cut: bytes of any two of three shares needed are equally frequent for both."""
    from flwr.common.secure_aggregation.crypto.shamir import create_shares

    for secret in (bytes(32), bytes(range(32))):
        cut = [create_shares(secret, 3, 5) for _ in range(300)]
        for pair in ((0, 1), (1, 4)):
            both = b"".join(of[share][4:36] for of in cut for share in pair)  # behind the number, before the padding
            assert float(chisquare(np.bincount(np.frombuffer(both, np.uint8), minlength=256)).pvalue) > 1e-4


def test_nobody_gives_both_shares_of_one_member():
    held = Round(4, 3, {4: "masked"})
    first = held.at[1].reveal_shares([1, 2, 3])
    assert sorted(first) == [1, 2, 3, 4]
    with pytest.raises(PerfedError, match="has already revealed its shares"):
        held.at[1].reveal_shares([1, 2, 3, 4])
    other = Round(4, 3)
    assert other.at[1].reveal_shares([1, 2, 3, 4]).keys() == first.keys()


def test_what_is_not_of_the_protocol_gets_nothing():
    held = Round(4, 3)
    fresh = Member(SUM, 3)
    keys = {1: fresh.keys, 2: held.keys[2], 3: held.keys[3]}
    with pytest.raises(PerfedError, match="the keys of member 2 are not its own"):
        fresh.share_secrets(2, keys)
    with pytest.raises(PerfedError, match="2 members; a sum needs 3"):
        fresh.share_secrets(1, {1: fresh.keys, 2: held.keys[2]})
    with pytest.raises(PerfedError, match="two members have one key"):
        fresh.share_secrets(1, {**keys, 4: held.keys[3]})
    with pytest.raises(PerfedError, match="no shares of the other members"):
        fresh.mask_values(np.zeros(1, np.uint64), {})
    fresh.share_secrets(1, keys)
    with pytest.raises(PerfedError, match="the sealed shares of member 2 were changed"):
        fresh.mask_values(np.zeros(1, np.uint64), {2: held.to[1][2], 3: held.to[1][3]})
    with pytest.raises(PerfedError, match="are needed"):
        held.at[1].reveal_shares([1, 2])
    with pytest.raises(PerfedError, match="are needed"):
        held.at[1].reveal_shares([1, 2, 9])


@pytest.mark.parametrize("count", range(4))
def test_a_member_puts_its_numbers_under_the_masks_of_all_others_or_of_none(count):
    """A server that withholds sealed shares from one member only could remove all of its masks."""
    members = {n: Member(SUM, 3) for n in range(1, 6)}
    keys = {n: member.keys for n, member in members.items()}
    sealed = {n: member.share_secrets(n, keys) for n, member in members.items()}
    some = {n: sealed[n][1] for n in range(2, 2 + count)}
    with pytest.raises(PerfedError, match=rf"shares of .*{2 + count}.* are missing; those of all 5 are needed"):
        members[1].mask_values(np.zeros(1, np.uint64), some)


def changed(share: bytes) -> bytes:
    """With an error of its own in each share; two equal ones may cancel."""
    return share[:-16] + hashlib.sha256(share).digest()[:16]


def test_with_no_share_to_spare_a_wrong_one_is_noticed():
    held = Round(4, 3, {4: "masked"})
    shares = {n: held.at[n].reveal_shares(held.arrived) for n in held.arrived}
    for member in (1, 4):
        wrong = {**shares, 2: {**shares[2], member: changed(shares[2][member])}}
        assert recover_secrets(3, held.shared, held.arrived, wrong).lacking == [member]


@pytest.mark.parametrize("givers", [(1,), (3,), (1, 2), (2, 5)])
@pytest.mark.parametrize("how", [changed, lambda share: b"", lambda share: share[:8], lambda share: bytes(len(share))])
def test_members_that_give_wrong_shares_are_named_and_the_sum_is_opened_without_them(givers, how):
    held = Round(6, 3, {6: "masked"})
    shares = {n: held.at[n].reveal_shares(held.arrived) for n in held.arrived}
    for giver in givers:
        shares[giver] = {member: how(share) for member, share in shares[giver].items()}
    recovery = recover_secrets(3, held.shared, held.arrived, shares)
    assert recovery.wrong == {giver: [1, 2, 3, 4, 5, 6] for giver in givers} and not recovery.lacking
    total = unmask_sum(SUM, held.keys, held.arrived, recovery.secrets)
    assert total.tolist() == [sum(int(held.values[n][i]) for n in held.arrived) % 2**64 for i in range(7)]


def test_a_member_that_has_cut_its_secret_wrongly_is_named_and_nobody_else():
    held = Round(5, 3)
    shares = {n: held.at[n].reveal_shares(held.arrived) for n in held.arrived}
    for n, of in shares.items():
        of[2] = Round(5, 3).at[n].reveal_shares(held.arrived)[2]
    recovery = recover_secrets(3, held.shared, held.arrived, shares)
    assert recovery.lacking == [2] and not recovery.wrong


def test_members_that_were_shown_other_members_do_not_share_masks():
    """The server swaps the keys of member 4 in the list of member 1 only."""
    members = {n: Member(SUM, 3) for n in range(1, 5)}
    keys = {n: member.keys for n, member in members.items()}
    shown = dict.fromkeys(keys, keys) | {1: {**keys, 4: Member(SUM, 3).keys}}
    sealed = {n: member.share_secrets(n, shown[n]) for n, member in members.items()}
    with pytest.raises(PerfedError, match="the sealed shares of member 1 were changed"):
        members[2].mask_values(np.zeros(1, np.uint64), {other: of[2] for other, of in sealed.items() if other != 2})

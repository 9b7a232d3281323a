"""When a position moves past pieces that were confirmed in any order."""

from __future__ import annotations

from penstock.documents.base import Acks


def test_the_position_moves_past_a_piece_when_all_before_it_are_confirmed() -> None:
    reached: list[int] = []
    acks: Acks[int] = Acks(reached.append)
    first, second, third = (acks.expect(number) for number in (1, 2, 3))
    second.confirm()
    assert reached == []
    first.confirm()
    assert reached == [2]
    third.confirm()
    assert reached == [2, 3]


def test_a_batch_that_is_confirmed_from_its_end_moves_the_position_once() -> None:
    reached: list[int] = []
    acks: Acks[int] = Acks(reached.append)
    for each in reversed([acks.expect(number) for number in range(5)]):
        each.confirm()
    assert reached == [4]


def test_a_part_of_a_transaction_moves_nothing_until_its_last_part_is_confirmed() -> None:
    reached: list[int] = []
    acks: Acks[int] = Acks(reached.append)
    before, part, last = acks.expect(1), acks.expect(), acks.expect(2)
    before.confirm()
    part.confirm()
    assert reached == [1]
    last.confirm()
    assert reached == [1, 2]


def test_pieces_that_were_forgotten_move_nothing_when_they_are_confirmed_late() -> None:
    reached: list[int] = []
    acks: Acks[int] = Acks(reached.append)
    lost = acks.expect(5)
    acks.forget()
    again = acks.expect(3)
    lost.confirm()
    assert reached == []
    again.confirm()
    assert reached == [3]

"""Mutated real messages: another valid decoding, or `DecodeError`; never anything else."""

from __future__ import annotations

import os
import random

import pytest

from penstock.capture.parcels import HEADER
from penstock.errors import DecodeError
from tests.unit.capture import corpus as recorded
from tests.unit.capture.gathering import assemble

CASES = int(os.environ.get("PENSTOCK_FUZZ_CASES", "500"))
SEED = int(os.environ.get("PENSTOCK_SEED", "0"))


def mutate(messages: list[bytes], chance: random.Random) -> list[bytes]:
    """Change some bytes of some messages, or the order and number of messages."""
    messages = list(messages)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        if not messages:
            break
        index = chance.randrange(len(messages))
        message = bytearray(messages[index])
        place = chance.randrange(HEADER, len(message)) if len(message) > HEADER else 0
        match chance.randrange(8):
            case 0 | 1 | 2:
                message[place] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, *b"tnubNKOIUDBCRST", chance.randrange(256)])
            case 3:
                message[place] ^= 1 << chance.randrange(8)
            case 4:
                del message[place:]
            case 5:
                message[place:place] = chance.randbytes(chance.choice([1, 4, 40]))
            case 6:
                messages.insert(chance.randrange(len(messages) + 1), bytes(message))
            case _:
                del messages[index]
                continue
        messages[index] = bytes(message)
    return messages


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
def test_mutated_messages_give_a_decode_error_or_another_decoding(tmp_path):
    corpus = recorded.load()
    outcomes = {"decoded": 0, "refused": 0}
    for case in range(CASES):
        chance = random.Random(f"{SEED}-{case}")
        messages = chance.choice([corpus.ordinary, corpus.ordinary, corpus.streamed])
        # Relations stand at the start of each transaction; a window keeps a case small.
        first = chance.randrange(max(1, len(messages) - 60)) if chance.random() < 0.3 else 0
        window = messages[first : first + 90]
        cuts = sorted(chance.sample(range(len(window)), min(3, len(window))))
        try:
            assemble(corpus, mutate(window, chance), tmp_path, cuts=cuts)
        except DecodeError:
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"case {case} of seed {SEED}: {type(error).__name__}: {error}") from error
        else:
            outcomes["decoded"] += 1
    # Both happen, or the test tests nothing.
    assert outcomes["decoded"] > CASES * 0.05, outcomes
    assert outcomes["refused"] > CASES * 0.2, outcomes

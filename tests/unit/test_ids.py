from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
import time
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure import ids
from tenure.errors import JobError

ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")


def test_an_id_has_26_crockford_characters_and_carries_its_time():
    before = time.time_ns() // 1_000_000
    made = ids.Ulids().new_id()
    after = time.time_ns() // 1_000_000

    assert ULID.fullmatch(made)
    assert before <= ids.id_time_ms(made) <= after


def test_known_values():
    assert ids.id_time_ms("01ARZ3NDEKTSV4RRFFQ69G5FAV") == 1_469_922_850_259
    assert ids.to_uuid("01ARZ3NDEKTSV4RRFFQ69G5FAV") == uuid.UUID(
        "01563e3a-b5d3-d676-4c61-efb99302bd5b"
    )


def test_ids_only_grow_also_mixed_with_bulk():
    made: list[str] = []
    for count in (1, 0, 3, 5000, 1, 2000):
        made.append(ids.new_id())
        made += ids.new_ids(count)

    assert made == sorted(set(made))
    assert len(made) == 6 + 7005
    assert all(ULID.fullmatch(one) for one in made)
    assert ids.new_ids(0) == []


def test_bulk_carries_over_the_low_part():
    source = ids.Ulids()
    made = source.new_ids(2_200_000)  # more than 2**20, so the high part must be counted up

    assert len(made) == 2_200_000
    assert all(a < b for a, b in itertools.pairwise(made))


def test_single_ids_carry_over_the_low_part():
    source = ids.Ulids()
    source._begin(2**47)  # far in the future, so that the clock stays behind it
    source._low = 2**20 - 2
    made = [source.new_id() for _ in range(3)]

    assert made == sorted(set(made))
    assert [one[-4:] for one in made] == ["ZZZZ", "0000", "0001"]


def test_a_clock_that_steps_backwards_does_not_matter():
    source = ids.Ulids()
    ahead = time.time_ns() // 1_000_000 + 3_600_000
    source._begin(ahead)
    made = [source.new_id(), *source.new_ids(3), source.new_id()]

    assert made == sorted(set(made))
    assert {ids.id_time_ms(one) for one in made} == {ahead}


def test_threads_share_one_source_without_repeats():
    source = ids.Ulids()
    made: list[list[str]] = [[] for _ in range(8)]

    def fill(into: list[str]) -> None:
        for _ in range(2000):
            into.append(source.new_id())
        into += source.new_ids(2000)

    threads = [threading.Thread(target=fill, args=(into,)) for into in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({one for some in made for one in some}) == 8 * 4000
    assert all(some == sorted(some) for some in made)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_repeat_its_parents_ids():
    # The clock is behind the sequence, so without a restart both would just count up.
    program = """
import os, sys
from tenure import ids
ids._ulids._begin(2**47)
ids._ulids._lock.acquire()  # as if another thread were making an id at the moment of the fork
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(write, "\\n".join(ids.new_ids(50)).encode())
    os._exit(0)
os.waitpid(pid, 0)
child = os.read(read, 65536).decode().split("\\n")
ids._ulids._lock.release()
parent = ids.new_ids(50)
print(len(child), len(set(child) & set(parent)), {c[:10] for c in child} == {parent[0][:10]})
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.split() == ["50", "0", "True"]


@given(st.integers(min_value=0, max_value=2**128 - 1))
def test_a_ulid_and_a_uuid_are_the_same_128_bits(number):
    as_uuid = uuid.UUID(int=number)
    ulid = ids.parse_id(as_uuid)

    assert ULID.fullmatch(ulid)
    assert ids.to_uuid(ulid) == as_uuid
    assert ids.id_time_ms(ulid) == number >> 80
    spellings = (ulid, ulid.lower(), str(as_uuid), str(as_uuid).upper(), as_uuid.hex)
    assert {ids.parse_id(spelling) for spelling in spellings} == {ulid}


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "xyz",
        "01ARZ3NDEKTSV4RRFFQ69G5FA",  # 25 characters
        "81ARZ3NDEKTSV4RRFFQ69G5FAV",  # beyond 128 bits
        "01ARZ3NDEKTSV4RRFFQ69G5FAU",  # U is not a Crockford character
        "01ARZ3NDEKTSV4RRFFQ69G5FA\u017f",  # upper() makes an S of it
        "01ARZ3NDEKTSV4RRFFQ69G5FAV\n",
        "01563e3a_b5d3_d676_4c61_efb99302bd5b",
        "01563e3ab5d3-d676-4c61-efb99302bd5b",
        "x" * 10_000,
        7,
        None,
        b"01ARZ3NDEKTSV4RRFFQ69G5FAV",
    ],
)
def test_anything_else_is_refused_in_a_short_message(wrong):
    with pytest.raises(JobError, match="is not a job id: expected a ULID") as caught:
        ids.parse_id(wrong)
    assert len(str(caught.value)) < 140


def test_the_message():
    with pytest.raises(JobError) as caught:
        ids.to_uuid("xyz")
    assert str(caught.value) == ("'xyz' is not a job id: expected a ULID (26 characters) or a UUID")

"""Plans and messages on their way between processes."""

from __future__ import annotations

import pickle
import socket
import threading
from array import array
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lite.engine.wire import PlanReader, PlanWriter
from dsv4lite.errors import CheckpointError, EngineDeadError, EngineStateError, InvalidRequestError
from dsv4lite.parallel.channel import Channel, Closed, encode, portable
from dsv4lite.request import TokenLogprob
from dsv4lite.scheduling.step_plan import Sampled, SequencePlan, StepPlan


def pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(Connection(ours.detach())), Channel(Connection(theirs.detach()))


ids = st.integers(0, 5)
pairs = st.lists(st.tuples(ids, ids), max_size=2).map(tuple)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(ids, st.integers(0, 2), st.booleans(), st.booleans()), max_size=4, unique_by=lambda s: s[0]),
            st.lists(ids, max_size=2).map(tuple),
            pairs,
        ),
        max_size=8,
    )
)
def test_plans_arrive_as_they_were_and_tables_only_when_they_change(steps: list) -> None:  # type: ignore[type-arg]
    writer, reader = PlanWriter(), PlanReader()
    tables: dict[int, tuple[int, ...]] = {}
    read: dict[int, tuple[int, ...]] = {}
    for number, (parts, resets, saves) in enumerate(steps):
        changed, sequences = set(), []
        for slot, pages, change, sample in parts:
            if change or slot not in tables:
                changed.add(slot)
                tables[slot] = tuple(range(number, number + pages + 2))
            sequences.append(
                SequencePlan(slot + 10, slot, number, (7,), tables[slot], 3, (1, 2), sample, None if sample else (0, 1))
            )
        plan = StepPlan(step=number, sequences=tuple(sequences), resets=resets, saves=saves)
        wire = writer.write(plan)
        arrived = reader.read(pickle.loads(encode(wire)))
        assert arrived == plan
        for got, sent, part in zip(arrived.sequences, plan.sequences, wire[1], strict=True):
            assert (part[4] == ()) == (sent.slot not in changed)
            assert sent.slot in changed or got.pages is read[got.slot]  # which is how graphs know that nothing changed
            read[got.slot] = got.pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.float8_e4m3fn], ids=str)
def test_tensors_travel_by_value(dtype: torch.dtype) -> None:
    here, there = pair()
    sent = torch.arange(12).view(3, 4).t().to(dtype)
    here.send({"x": sent, "empty": sent[:0]})
    arrived = there.receive(5.0)
    assert arrived["x"].dtype == dtype and arrived["empty"].shape == (0, 3)
    assert torch.equal(arrived["x"].float(), sent.float())
    arrived["x"].fill_(0)  # its memory is its own


def test_results_of_a_step_arrive() -> None:
    logprob = TokenLogprob(logprob=-1.0, rank=2, token_ids=array("i", [1, 2]), values=array("f", [-1.0, -2.0]))
    here, there = pair()
    here.send({4: Sampled(token_id=9, logprob=logprob)})
    arrived = there.receive(5.0)[4]
    assert arrived.token_id == 9 and arrived.logprob.rank == 2
    assert arrived.logprob == logprob


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("bad", problems=["a: missing"]),
        InvalidRequestError("bad", parameter="n", value=3),
        EngineStateError("bad", state="closed", allowed=("ready",)),
        EngineDeadError("bad", rank=3, phase="load"),
        ValueError("plain"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_arrive_with_their_attributes(error: Exception) -> None:
    arrived = pickle.loads(encode(portable(error)))
    assert type(arrived) is type(error) and str(arrived) == str(error)
    notes = arrived.__dict__.pop("__notes__")
    error.__dict__.pop("__notes__")
    assert arrived.__dict__ == error.__dict__ and type(error).__name__ in notes[0]


def test_error_that_cannot_be_sent_arrives_as_text() -> None:
    class Local(Exception):
        pass

    arrived = pickle.loads(encode(portable(Local("of a function"))))
    assert type(arrived) is RuntimeError and "Local: of a function" in str(arrived)


def test_channel_says_that_nothing_came_and_that_the_other_end_is_gone() -> None:
    here, there = pair()
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        here.receive(0.01)
    there.close()
    with pytest.raises(Closed):
        here.receive(5.0)
    with pytest.raises(Closed):
        for _ in range(100):  # the first may still be taken by the system
            here.send(bytes(1 << 16))
    here.close()
    with pytest.raises(Closed):
        here.receive()


def test_hanging_up_wakes_who_waits() -> None:
    here, _there = pair()
    woken = []

    def wait() -> None:
        with pytest.raises(Closed):
            here.receive()
        woken.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    here.shut_down()
    thread.join(10)
    assert woken == [True]
    here.close()
    here.shut_down()

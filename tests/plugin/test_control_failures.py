"""A request whose handler raises is answered with a 400; SGLang's scheduler ends instead.

The scheduler and the HTTP process are stand-ins; dispatch, messages and waiting are SGLang's.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from fastapi import HTTPException

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]


class Broken(Exception):
    """Raised by a handler."""


def fail(request: Any) -> Any:
    raise Broken("no recorder")


def scheduler(handlers: list[tuple[type, Any]], *, hooked: bool = True) -> Any:
    """What dispatches, with these handlers in place of its own."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.utils import TypeBasedDispatcher

    from sglang_ascend.plugin.requests.control_failures import answer_failures

    made = Scheduler.__new__(Scheduler)
    made._request_dispatcher = TypeBasedDispatcher(handlers)
    if hooked:
        answer_failures(None, made)
    return made


def ask(request: Any, dispatcher: Any, *, hooked: bool = True) -> list[Any]:
    """Over the wire to the scheduler and back, as an HTTP handler waits for it."""
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

    call = FanOutCommunicator.__call__
    call = call if hooked else call.__wrapped__

    async def wait() -> list[Any]:
        communicator = FanOutCommunicator(sent.append, fan_out=1)
        waiting = asyncio.ensure_future(call(communicator, request))
        await asyncio.sleep(0)
        answer = dispatcher(msgpack_decode(msgpack_encode(sent.pop())))
        communicator.handle_recv(msgpack_decode(msgpack_encode(answer)))
        return await waiting

    sent: list[Any] = []
    return asyncio.run(wait())


def record() -> Any:
    from sglang.srt.managers.io_struct import ExpertDistributionReq, ExpertDistributionReqType

    return ExpertDistributionReq(action=ExpertDistributionReqType.START_RECORD)


def test_a_handler_that_raises_is_answered_with_a_400_that_names_what_failed():
    dispatcher = scheduler([(type(record()), fail)])._request_dispatcher
    with pytest.raises(HTTPException) as refused:
        ask(record(), dispatcher)
    assert refused.value.status_code == 400
    assert "ExpertDistributionReq failed with Broken('no recorder')" in refused.value.detail


def test_without_the_first_hook_the_scheduler_raises_and_without_the_second_it_is_a_success():
    handlers = [(type(record()), fail)]
    with pytest.raises(Broken):
        ask(record(), scheduler(handlers, hooked=False)._request_dispatcher)
    assert len(ask(record(), scheduler(handlers)._request_dispatcher, hooked=False)) == 1


def test_an_answer_passes_as_it_is():
    from sglang.srt.managers.io_struct import ExpertDistributionReqOutput

    dispatcher = scheduler([(type(record()), lambda request: ExpertDistributionReqOutput())])
    assert ask(record(), dispatcher._request_dispatcher) == [ExpertDistributionReqOutput()]


def test_a_refused_profile_is_a_400_with_sglang_s_own_sentence():
    from sglang.srt.managers.io_struct import ProfileReq, ProfileReqOutput, ProfileReqType

    refusal = ProfileReqOutput(success=False, message="Profiling is not in progress.")
    dispatcher = scheduler([(ProfileReq, lambda request: refusal)])._request_dispatcher
    with pytest.raises(HTTPException, match="Profiling is not in progress"):
        ask(ProfileReq(req_type=ProfileReqType.STOP_PROFILE), dispatcher)


def test_a_profile_that_could_be_written_is_asked_for(tmp_path):
    from sglang.srt.managers.io_struct import ProfileReq, ProfileReqOutput

    answer = ProfileReqOutput(success=True, message="Succeeded")
    dispatcher = scheduler([(ProfileReq, lambda request: answer)])._request_dispatcher
    assert ask(ProfileReq(output_dir=str(tmp_path / "new")), dispatcher) == [answer]
    assert (tmp_path / "new").is_dir()


def test_one_that_could_not_is_refused_before_any_rank_is_asked(tmp_path):
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.managers.io_struct import ProfileReq

    (tmp_path / "a file").touch()
    sent: list[Any] = []
    request = ProfileReq(output_dir=str(tmp_path / "a file" / "new"), num_steps=3)
    with pytest.raises(HTTPException, match=r"output_dir .* \(Not a directory\): name") as refused:
        asyncio.run(FanOutCommunicator(sent.append, fan_out=1)(request))
    assert refused.value.status_code == 400
    assert not sent


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"profile_by_stage": True}, "profile_by_stage needs num_steps"),
        ({"start_step": 1, "activities": ["CPU", "MEM"]}, "MEM, which no CPU has"),
        ({"profile_by_stage": True, "num_steps": 2, "activities": ["RPD"]}, "RPD, which no CPU"),
    ],
)
def test_a_profile_that_fails_between_two_batches_is_refused_before(tmp_path, fields, said):
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.managers.io_struct import ProfileReq

    sent: list[Any] = []
    request = ProfileReq(output_dir=str(tmp_path), **fields)
    with pytest.raises(HTTPException, match=said) as refused:
        asyncio.run(FanOutCommunicator(sent.append, fan_out=1)(request))
    assert refused.value.status_code == 400
    assert not sent


def test_a_threshold_that_is_refused_at_start_is_not_set_later():
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.managers.io_struct import SetInternalStateReq, SetInternalStateReqOutput

    sent: list[Any] = []
    for name in ("single", "acc"):
        request = SetInternalStateReq(server_args={f"speculative_accept_threshold_{name}": 0.5})
        with pytest.raises(HTTPException, match="would change replies and is not served"):
            asyncio.run(FanOutCommunicator(sent.append, fan_out=1)(request))
    assert not sent
    answer = SetInternalStateReqOutput(updated=True)
    dispatcher = scheduler([(SetInternalStateReq, lambda request: answer)])._request_dispatcher
    exact = SetInternalStateReq(server_args={"speculative_accept_threshold_single": 1.0})
    assert ask(exact, dispatcher) == [answer]


@pytest.mark.parametrize("is_batch", [False, True])
def test_whoever_waits_for_tokens_is_told_and_the_others_of_a_batch_are_served(is_batch):
    from sglang.srt.managers import io_struct

    request_type = io_struct.TokenizedGenerateReqInput
    fields = {field.name: None for field in msgspec.structs.fields(request_type) if field.required}
    good, bad = (request_type(**fields | {"rid": rid}) for rid in ("good", "bad"))
    served: list[str] = []

    def admit(request: Any) -> None:
        served.append(request.rid) if request is good else fail(request)

    sent: list[Any] = []
    made = scheduler([(request_type, admit)])
    made.send_abort_output = lambda answer, request: sent.append((answer, request))
    batch = io_struct.BatchTokenizedGenerateReqInput(batch=[bad, good])
    for request in [batch] if is_batch else batch.batch:
        assert made._request_dispatcher(request) is None
    assert served == ["good"]
    ((answer, request),) = sent
    assert request is bad
    assert answer.rid == "bad"
    assert answer.finished_reason["status_code"] == 400
    assert "failed with Broken('no recorder')" in answer.finished_reason["message"]


def test_what_nobody_waits_for_is_not_answered():
    from sglang.srt.managers.io_struct import CloseSessionReqInput

    dispatcher = scheduler([(CloseSessionReqInput, fail)])._request_dispatcher
    assert dispatcher(CloseSessionReqInput(session_id="s")) is None


def test_every_message_that_a_path_waits_for_can_say_that_it_failed():
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.tokenizer_control_mixin import _COMMUNICATOR_SPECS

    from sglang_ascend.plugin.requests.control_failures import FAILED, failed_answer

    answers = []
    for cls in io_struct.BaseReq.__subclasses__():
        if cls.__name__.endswith(("Req", "ReqInput")):
            request = type(cls.__name__, (), {})()
            answers.append(failed_answer(request, Broken("why")))
    answers = [answer for answer in answers if answer is not None]
    assert {spec[1] for spec in _COMMUNICATOR_SPECS} <= {type(answer) for answer in answers}
    for answer in answers:
        assert io_struct.msgpack_decode(io_struct.msgpack_encode(answer)) == answer
        assert answer.rid.startswith(FAILED)
        assert not getattr(answer, "success", False)


def test_a_session_that_failed_to_open_is_told_which_it_is():
    from sglang.srt.managers.io_struct import OpenSessionReqInput

    from sglang_ascend.plugin.requests.control_failures import failed_answer

    request = OpenSessionReqInput(capacity_of_str_len=8, session_id="this one")
    assert failed_answer(request, Broken()).session_id == "this one"

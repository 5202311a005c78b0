"""How often a server's decode step waits for the device, without and with MTP."""

from __future__ import annotations

from dataclasses import replace

from sglang_ascend.bench.server import ServerProcess
from sglang_ascend.env import LOG_WAITS
from sglang_ascend.verify.checks import Check, Progress, found_by
from sglang_ascend.verify.operators.synchronisation import WAITED
from sglang_ascend.verify.serving import Setting, ask, left_out, running, steps_of

PROMPTS = [[16 * request + position + 5 for position in range(16)] for request in range(8)]
# A reply of either length has one prefill: what the longer one has more is steps.
SHORT, LONG = 8, 72
# A line of the log, every 40 steps, may read a number.
BUDGET = 0.1


def waits_per_step(server: ServerProcess) -> float:
    """Lines of torch_npu's debug mode in the log, by the steps between a short and a long reply."""
    waits, steps = [], []
    for new_tokens in (SHORT, SHORT, LONG):  # the first one captures and compiles
        before = server.log().count(WAITED)
        replies = ask(server, PROMPTS, new_tokens)
        waits.append(server.log().count(WAITED) - before)
        steps.append(steps_of(replies, new_tokens))
    return (waits[2] - waits[1]) / (steps[2] - steps[1])


def check_steps(kind: str, server: ServerProcess) -> Check:
    """Never raises. Plain decode is not judged: it is SGLang's own. Nor is a server that chooses K,
    which waits where it drafts again."""
    title = f"waits per step, {kind}"

    def counted() -> Check:
        per_step = waits_per_step(server)
        return Check(title, per_step <= BUDGET if kind == "mtp" else None, {"waits": per_step})

    return found_by(title, counted)


def check_waits(setting: Setting, progress: Progress) -> list[Check]:
    """Of a server that dies the others still show what they can."""
    if skipped := left_out(setting):
        return skipped
    if setting.device == "cpu":
        checks = [Check("waits", None, note="there is no device to wait for")]
    else:
        progress("servers start", 2)
        with running(setting, {LOG_WAITS.name: "1"}) as (servers, checks):
            progress("steps", 2)
            checks += [check_steps(kind, server) for kind, server in servers.items()]
    return [replace(check, name=f"{setting.name}: {check.name}") for check in checks]

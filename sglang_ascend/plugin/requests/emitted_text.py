"""The text of steps that emit several tokens: it reads and stops as if they came one at a time."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.managers.schedule_batch import Req
from sglang.utils import _is_chinese_char


def settle_token_by_token(
    update: Callable[[Req, int], None], self: Req, new_accepted_len: int = 1
) -> None:
    """Around ``Req.update_finish_state``: the first stop of the text ends the request, and what the
    step emitted behind it counts for nothing.

    SGLang looks at the step as a whole: the first stop string of the request's list wins over one
    that the text has earlier, and any stop string over a stop token before it.
    """
    _settle(update, self, new_accepted_len)
    if self.finished_len is None:
        return
    # The whole step was counted. A reply begins with its thinking.
    self.reasoning_tokens = min(self.reasoning_tokens, self.finished_len)
    # The next request of a session begins with all of them. Hidden states are found by their end.
    if self.session is not None and not self.return_hidden_states:
        del self.output_ids[self.finished_len :]


def _settle(update: Callable[[Req, int], None], self: Req, new_accepted_len: int) -> None:
    params = self.sampling_params
    if new_accepted_len < 2 or not (params.stop_strs or params.stop_regex_strs):
        update(self, new_accepted_len)
        return
    emitted, grammar = self.output_ids[-new_accepted_len:], self.grammar
    del self.output_ids[-new_accepted_len:]
    for place, token in enumerate(emitted, 1 - len(emitted)):
        self.output_ids.append(token)
        # It has accepted the whole step already: whether it has ended concerns the last token.
        self.grammar = None if place else grammar
        update(self, 1)


def find_printable_text(text: str) -> str:
    """For ``sglang.utils.find_printable_text``: all up to the last space, newline or CJK character.

    What is printable stays so when more text comes. By SGLang's rule "世�" prints "世" and "世a�"
    nothing, so that a stream of several tokens a step repeats the character.
    """
    for end in range(len(text), 0, -1):
        if text[end - 1] in " \n" or _is_chinese_char(ord(text[end - 1])):
            return text[:end]
    return ""

"""The text of steps that emit several tokens: it reads and stops as if they came one at a time."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.managers.schedule_batch import Req
from sglang.utils import _is_chinese_char


def settle_token_by_token(
    update: Callable[[Req, int], None], self: Req, new_accepted_len: int = 1
) -> None:
    """Around ``Req.update_finish_state``: the first stop of the text ends the request.

    SGLang looks at the step as a whole: the first stop string of the request's list wins over one
    that the text has earlier, and any stop string over a stop token before it.
    """
    params = self.sampling_params
    if new_accepted_len < 2 or not (params.stop_strs or params.stop_regex_strs):
        update(self, new_accepted_len)
        return
    emitted = self.output_ids[-new_accepted_len:]
    del self.output_ids[-new_accepted_len:]
    # A grammar has accepted the whole step already: whether it has ended concerns the last token.
    grammar, self.grammar = self.grammar, None
    num_settled = 0
    while num_settled < len(emitted) and not self.finished():
        self.output_ids.append(emitted[num_settled])
        num_settled += 1
        if num_settled == len(emitted):
            self.grammar = grammar
        update(self, 1)
    self.grammar = grammar
    self.output_ids.extend(emitted[num_settled:])


def find_printable_text(text: str) -> str:
    """For ``sglang.utils.find_printable_text``: all up to the last space, newline or CJK character.

    What is printable stays so when more text comes. By SGLang's rule "世�" prints "世" and "世a�"
    nothing, so that a stream of several tokens a step repeats the character.
    """
    for end in range(len(text), 0, -1):
        if text[end - 1] in " \n" or _is_chinese_char(ord(text[end - 1])):
            return text[:end]
    return ""

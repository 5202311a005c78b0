"""The offline example says something of a reply that no draft was verified for."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang

EXAMPLE = Path(__file__).parents[2] / "examples" / "offline_batch.py"
pytestmark = pytest.mark.sglang


class Engine:
    """Answers with one token, that of the prefill, which has nothing about drafts."""

    def __init__(self, **flags: object) -> None:
        template = SimpleNamespace(apply_chat_template=lambda turns, **options: turns[0]["content"])
        self.tokenizer_manager = SimpleNamespace(tokenizer=template)

    def generate(self, prompts: list[str], parameters: dict[str, int]) -> list[dict[str, object]]:
        return [{"text": "Yes", "meta_info": {"completion_tokens": 1}} for _ in prompts]

    def shutdown(self) -> None:
        pass


def test_a_reply_of_one_token_is_one_token_a_forward(monkeypatch, capsys):
    monkeypatch.setattr(sglang, "Engine", Engine)
    runpy.run_path(str(EXAMPLE))["main"]("a folder", max_new_tokens=1)
    assert capsys.readouterr().out.count("Yes\n[accept length 1.00]\n") == 3

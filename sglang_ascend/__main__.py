"""`python -m sglang_ascend`: the command `sglang-ascend`, where no script is installed."""

from sglang_ascend.cli import app

if __name__ == "__main__":
    app()

"""Python programs that begin with packages imported: copies of a process that has done no more.

A server of SGLang imports torch's compiler, transformers and openai's types for ten seconds. Here
one process, the template, imports them. `python -m MODULE ARGUMENTS` is then a copy of it that runs
the module from its first line. Another template, itself a copy, imports SGLang too: the plugin
comes to a server that begins there as to a scheduler that SGLang spawns, behind SGLang.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sglang_ascend.bench.server import die_with_parent

TEMPLATE = "BEGUN_TEMPLATE"  # its socket, in the environment of what it has begun
SERVERS = "BEGUN_SERVERS"  # the socket of the one that servers are copies of
MAX_REQUEST = 1 << 20
# What takes a server longest; neither SGLang nor this plugin is among it.
IMPORTED = [
    "torch._inductor.compile_fx",
    "torch._dynamo.repro.after_dynamo",
    "transformers.activations",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.modeling_layers",
    "transformers.models.whisper.modeling_whisper",
    "openai.types.realtime",
    "openai.types.responses",
    "triton",
    "timm.data",
    "gguf",
    "compressed_tensors.config",
    "fastapi",
    "aiohttp.web",
    "requests",
    "IPython.display",
    "xgrammar",
]
SGLANG = [
    "sglang.srt.managers.scheduler",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",
]


class Template:
    """A process that has imported IMPORTED, in this environment; or a copy of another template that
    has imported SGLANG besides."""

    def __init__(self, environ: Mapping[str, str], of: Template | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._address = str(Path(self._folder.name) / "socket")
        output = sys.stderr.fileno()  # torch_npu prints when it is loaded
        if of is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, self._address, *IMPORTED],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                preexec_fn=die_with_parent,
            )
        else:
            program, folder = Path(__file__).stem, str(Path(__file__).parent)
            with open(os.devnull, "rb") as nothing:
                streams = (nothing.fileno(), output, output)
                command = [program, self._address, *SGLANG]
                self._process = of.begin(command, environ, *streams, folder=folder)
        atexit.register(self.stop)

    def begin(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *streams: int,
        folder: str | None = None,
    ) -> Program:
        """`python -m ARGUMENTS` in a folder, this one if none is given, with files for its input,
        output and errors, in a session of its own."""
        return begin(self.address(), arguments, environ, streams, folder)

    def address(self) -> str:
        """Its socket, where it answers once it has imported everything."""
        while not Path(self._address).exists():
            if self._process.poll() is not None:
                raise RuntimeError("the template of begun processes has ended.")
            time.sleep(0.05)
        return self._address

    def run_text(
        self, text: str, arguments: Sequence[str], environ: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """As ``run``, of a program's text."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "program.py").write_text(text)
            return self.run(["program", *arguments], environ, timeout, folder)

    def run(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        timeout: float,
        folder: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """As ``subprocess.run`` of `python -m ARGUMENTS` without input. Raises TimeoutError."""
        with (
            open(os.devnull) as nothing,
            tempfile.TemporaryFile("w+") as output,
            tempfile.TemporaryFile("w+") as errors,
        ):
            streams = (stream.fileno() for stream in (nothing, output, errors))
            program = self.begin(arguments, environ, *streams, folder=folder)
            try:
                status = program.wait(timeout)
            except TimeoutError:
                program.kill()
                raise
            output.seek(0)
            errors.seek(0)
            words = [output.read(), errors.read()]
            return subprocess.CompletedProcess(list(arguments), status, *words)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


@cache
def template(**variables: str) -> Template:
    """The one with this process's environment and what packages read of it as they are imported."""
    return Template(os.environ | variables)


@cache
def server_template() -> Template:
    """As ``template``, with SGLang imported."""
    return Template(os.environ, template())


def may_have_sglang(environ: Mapping[str, str]) -> bool:
    """Whether a server with these variables may begin with SGLang imported, which reads some of its
    own as it is imported."""
    return not any(
        name.startswith("SGLANG_")
        and not name.startswith("SGLANG_ASCEND_")
        and os.environ.get(name) != value
        for name, value in environ.items()
    )


class Program:
    """A program that has been begun; ``pid`` is also its session's."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._status, self._lock = connection, None, threading.Lock()
        self.pid = int(self._received())

    def poll(self) -> int | None:
        with contextlib.suppress(TimeoutError):
            return self.wait(1e-6)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, as ``subprocess.Popen.wait`` gives it, to any thread. Raises
        TimeoutError."""
        with self._lock:
            if self._status is None:
                self._connection.settimeout(timeout)
                self._status = int(self._received())
            return self._status

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)

    def _received(self) -> bytes:
        received = self._connection.recv(MAX_REQUEST)
        if not received:
            raise RuntimeError("the template of begun processes has ended.")
        return received


def again(arguments: Sequence[str], environ: Mapping[str, str], stdin: int = 0) -> Any:
    """The command of this process with more arguments, begun as it was; has ``wait``."""
    command = [*sys.orig_argv[1:], *arguments]
    if TEMPLATE not in environ:
        return subprocess.Popen([sys.executable, *command], env=dict(environ), stdin=stdin)
    return begin(environ[TEMPLATE], command[1:], environ, (stdin, 1, 2))


def begin(
    address: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    streams: Sequence[int],
    folder: str | None = None,
) -> Program:
    """As ``Template.begin``, of the template with this socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    told = {**environ, TEMPLATE: address}
    request = json.dumps([list(arguments), told, folder or os.getcwd()]).encode()
    socket.send_fds(connection, [request], list(streams))
    return Program(connection)


def main(address: str, *modules: str) -> str:
    """Serves requests for ever; returns in each copy, with the module that it is to run."""
    # What is imported stays for ever: a search for garbage among it is a third of the time that it
    # takes, and every copy would search it again.
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        os.rename(f"{address}.new", address)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a keeper needs no burial
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    return keep(connection)


def keep(connection: socket.socket) -> str:
    """Forks the program, which says its pid, and says its status when it ends; returns in it."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3)
    program = os.fork()
    if program == 0:
        os.setsid()
        # By itself, for whoever is told its pid may signal its group.
        connection.send(str(os.getpid()).encode())
        connection.close()
        return become(*json.loads(request), streams)
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(BrokenPipeError):  # whoever began it may have ended
        _, status = os.waitpid(program, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(arguments: list[str], environ: dict[str, str], folder: str, streams: list[int]) -> str:
    die_with_parent()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    paths = environ.get("PYTHONPATH", "")
    of_its_own = paths != os.environ.get("PYTHONPATH", "")
    sys.path[:1] = [folder, *filter(None, paths.split(os.pathsep))] if of_its_own else [folder]
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = arguments
    sys.orig_argv = [sys.executable, "-m", *arguments]
    if of_its_own:  # Python has run the template's own sitecustomize.py, in the template
        sys.modules.pop("sitecustomize", None)
        site.execsitecustomize()
    return arguments[0]


def run(address: str, *modules: str) -> None:
    """A copy's module, as Python runs it and ends it, but that nothing is freed: that takes a copy
    seconds, for all that the template has imported."""
    status = 1
    # What is registered first is called last, behind what packages register.
    atexit.register(lambda: leave(status))
    try:
        runpy.run_module(main(address, *modules), run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status = (end.code or 0) & 0xFF
        raise


def leave(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run(*sys.argv[1:])

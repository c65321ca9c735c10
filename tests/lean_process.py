"""The `lean` command in processes forked from one that has imported everything and run nothing.

To its user such a process is as one just started; the imports, most of a short command's time, are done once.
That `lean` starts is shown by those tests that start it as a user does.
"""

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

STARTED = [sys.executable, "-m", "leanmoe"]
_REQUEST_BYTES = 1 << 16


def started(*arguments: str | Path, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Starts `lean` and waits for its end."""
    return subprocess.run(
        [*STARTED, *map(str, arguments)], capture_output=True, text=True, input=stdin, check=False
    )


def lean(*arguments: str | Path, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs `lean` to its end in this directory, and says what it wrote to its streams, which are files."""
    streams = [tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(3)]  # noqa: SIM115  closed below
    try:
        streams[0].write(stdin)
        streams[0].seek(0)
        request = json.dumps([os.getcwd(), *map(str, arguments)]).encode()
        _, line = _server()
        socket.send_fds(line, [request], [stream.fileno() for stream in streams])
        code = int(line.recv(16))
        for stream in streams[1:]:
            stream.seek(0)
        return subprocess.CompletedProcess(arguments, code, streams[1].read(), streams[2].read())
    finally:
        for stream in streams:
            stream.close()


@cache
def _server() -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """The server and our end of the line to it. It ends when this end is closed: at the latest with this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, __file__, str(its.fileno())],
        pass_fds=[its.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    its.close()
    return server, ours


def _serve(line: socket.socket) -> None:
    """Forks for each request and answers with the exit code. Returns in each child, which is to become `lean`."""
    while True:
        request, streams, _, _ = socket.recv_fds(line, _REQUEST_BYTES, 3)
        if not request:
            os._exit(0)
        child = os.fork()
        if child == 0:
            break
        for stream in streams:
            os.close(stream)
        line.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    line.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    folder, *arguments = json.loads(request)
    os.chdir(folder)
    sys.argv = ["lean", *arguments]


if __name__ == "__main__":
    import leanmoe.cli.main
    import leanmoe.engine.llm  # noqa: F401  what `lean` imports only where it is needed
    from leanmoe.cli.entry import main

    gc.freeze()  # or each child searches all that is imported for garbage as it ends
    _serve(socket.socket(fileno=int(sys.argv[1])))
    main()

"""Serves the live page to this machine alone, until Ctrl-C: `make live`. It needs only Python's
standard library."""
import contextlib
import functools
import http.server
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PORT = 8000


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """Print nothing for each request."""


def server(port=PORT):
    """A server at this port; if it is taken, at one that the system chooses."""
    serve = functools.partial(Handler, directory=ROOT)
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), serve)
    except OSError as error:
        free = http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve)
        print(f"port {port} cannot be used ({error.strerror}); taking {free.server_port} instead",
              file=sys.stderr)
        return free


def main():
    with server() as serving:
        print(f"open http://127.0.0.1:{serving.server_port}/docs/live.html    (Ctrl-C ends it)",
              flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            serving.serve_forever()


if __name__ == "__main__":
    main()

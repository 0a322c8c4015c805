"""A light CPU engine: llama.cpp's server from the package xllamacpp, with the API key taken from the environment.

python -m gristmill.llamacpp_server --model GGUF --name NAME [NAME ...] --port P [--context N] [--parallel N]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

KEY_ENV = "GRISTMILL_API_KEY"


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM; exit status 1 with one line on standard error when the model cannot be served."""
    parser = argparse.ArgumentParser(prog="gristmill.llamacpp_server")
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--name", required=True, nargs="+", help="names that the model is served under")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context", type=int, default=2048, help="tokens that one request may have, answer included")
    parser.add_argument("--parallel", type=int, default=4, help="requests worked on at a time")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--embeddings", action="store_true", help="serve embeddings instead of text")
    args = parser.parse_args(argv)
    key = os.environ.get(KEY_ENV)
    if not key:
        return _failed(f"the environment variable {KEY_ENV} must hold the API key")
    if not Path(args.model).is_file():
        return _failed(f"there is no model file {args.model}")
    try:
        import xllamacpp
    except ImportError as error:
        return _failed(f"the package xllamacpp is missing ({error}); make demo installs it")
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.model_alias = {args.name[0]}  # any name is answered; this one is given back
    params.hostnames = [args.host]
    params.port = args.port
    params.api_keys = [key]
    params.n_parallel = args.parallel
    params.n_ctx = args.context * args.parallel  # the server shares it out among the requests
    params.kv_unified = False
    if args.embeddings:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
        params.n_batch = params.n_ubatch = args.context  # a text is pooled in one batch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.endpoint_metrics = True
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # nothing to save, and requests in flight are asked again
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        return _failed(f"the model {args.model} cannot be served on port {args.port}: {error}")
    print(f"listening on {server.listening_address}", file=sys.stderr, flush=True)
    stop.wait()
    return 0


def _failed(what: str) -> int:
    print(f"gristmill.llamacpp_server: {what}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""The demo itself: serve the model, ask one question, say which attention backend answered."""

from contextlib import ExitStack, suppress

from flashinfer_core._folders import cache_folder
from flashinfer_core.demo.console import console, step
from flashinfer_core.demo.engines import ENGINES
from flashinfer_core.demo.model import MODEL_NAME, prepare_model
from flashinfer_core.demo.server import HOST, Server


def serve_demo(engine_name: str, backend: str | None, port: int, question: str, once: bool) -> None:
    """Serve the demo model, print the answer to `question`, and go on serving unless `once`.

    `engine_name` is a key of `ENGINES`, and `backend` the engine's name of an attention backend, by default ours.

    Raises
    ------
    DemoError
        The model, the server or the answer failed, or another attention backend than the one asked for served.
    """
    model = prepare_model()
    console.print(f"Demo model: {model}")
    logs = cache_folder() / "logs"
    logs.mkdir(exist_ok=True)
    with ExitStack() as stack:
        engine = ENGINES[engine_name]
        log = logs / f"serve-{engine.name}.log"
        with step(f"Starting {engine.title}") as show:
            server = Server(
                engine, model, log, backend=backend, port=port, arguments=engine.short_context, progress=show
            )
            stack.enter_context(server)
        answer = server.chat(question, max_tokens=128)
        server.confirm_backend()
        speed = len(answer.tokens) / answer.seconds
        console.print(f"\nQuestion:  {question}\nAnswer:    {answer.text.strip()}\n")
        console.print(f"{len(answer.tokens)} tokens in {answer.seconds:.2f} s, {speed:.1f} tokens/s")
        console.print(f"Attention backend that served it: {server.served_backend()}")
        if not once:
            console.print(f"\nServing {MODEL_NAME} at http://{HOST}:{server.port}/v1 until Ctrl-C")
            with suppress(KeyboardInterrupt):
                server.wait()

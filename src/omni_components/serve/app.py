"""create_app(): the routes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib import resources
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response, StreamingResponse

from .errors import ApiError, answer_in_shape
from .guard import Guard
from .pictures import encoded
from .schemas import (
    ErrorBody,
    ImageDatum,
    ImageRequest,
    ImageResponse,
    ModelCard,
    ModelList,
    Residency,
    Status,
)
from .service import Service
from .settings import ServeSettings

if TYPE_CHECKING:
    from ..omni import Omni
    from .jobs import Job

_PAGE = {  # what the browser asks for, and where it is in the package
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_PUBLIC = (*_PAGE, "/health", "/ready")
_PICTURES = "/v1/images/generations"
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused; the message says why."},
    503: {"model": ErrorBody, "description": "Not now; Retry-After says when to try again."},
}


def create_app(omni: Omni, settings: ServeSettings | None = None) -> FastAPI:
    """An ASGI application that serves a model.

    Args:
        omni: The model; whoever made it closes it, after the application has shut down.
        settings: Limits and keys.

    Returns:
        The application; ``app.state.service`` is what works behind it.

    Raises:
        ModelError: The model makes no pictures, or not from what a request holds.
    """
    settings = settings or ServeSettings()
    service = Service(omni, settings)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await service.close()

    app = FastAPI(
        title=f"omni-components: {service.model.name}",
        version=version("omni-components"),
        lifespan=life,
        docs_url=None,  # these pages would ask another server for their scripts
        redoc_url=None,
        redirect_slashes=False,  # where it would send a client, the client's own Host would say
    )
    app.state.service = service
    answer_in_shape(app)
    app.include_router(_openai(service))
    app.include_router(_operations(service))
    app.include_router(_page())
    counted = {_PICTURES: service.metrics.answered}
    app.add_middleware(Guard, settings=settings, public=_PUBLIC, counted=counted)
    return app


# --- OpenAI's ---------------------------------------------------------------------------------------------


def _openai(service: Service) -> APIRouter:
    router = APIRouter(responses=_ERRORS, tags=["OpenAI"], route_class=_StrictRoute)

    @router.post(_PICTURES)
    async def generate(asked: ImageRequest, request: Request) -> ImageResponse:
        """Draw pictures."""
        return await _drawn(service, service.admit(asked), asked, request)

    @router.get("/v1/models")
    async def models() -> ModelList:
        """The one model that is served."""
        return ModelList(data=[_card(service)])

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """The model by its id."""
        if model != service.model.name:
            text = f"The model '{model}' does not exist; there is '{service.model.name}'."
            raise ApiError(404, text, "model_not_found", param="model")
        return _card(service)

    return router


async def _drawn(service: Service, job: Job, asked: ImageRequest, request: Request) -> ImageResponse:
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    pictures = await service.pictures(job, gone)
    form = asked.output_format or "png"
    files = await asyncio.to_thread(
        lambda: [encoded(one, form, asked.output_compression) for one in pictures]
    )
    return ImageResponse(
        created=int(time.time()),
        data=[ImageDatum(b64_json=file, seed=seed) for file, seed in zip(files, job.seeds, strict=True)],
        output_format=form,
        size=f"{pictures[0].width}x{pictures[0].height}",
    )


class _StrictRoute(APIRoute):
    """Reads JSON as the standard has it: what a proxy has read in it is what is read here."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle


class _StrictRequest(Request):
    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=_each_once, parse_constant=_no_number)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise json.JSONDecodeError("a name is given twice in one object", "", 0)
    return found


def _no_number(text: str) -> NoReturn:
    raise json.JSONDecodeError(f"{text} is no number", "", 0)


def _card(service: Service) -> ModelCard:
    return ModelCard(id=service.model.name, created=service.created)


# --- ours -------------------------------------------------------------------------------------------------


def _operations(service: Service) -> APIRouter:
    router = APIRouter(responses=_ERRORS, tags=["operations"])

    @router.get("/v1/residency")
    async def residency() -> Residency:
        """Who is on the device, what it has cost, and whether the invariant holds."""
        return service.residency()

    @router.get("/v1/events", response_class=StreamingResponse, responses=_EVENTS)
    async def events() -> Response:
        """What moves, as it moves: server-sent events."""
        if service.live.full:
            raise ApiError(429, "Too many streams are open.", "too_many_streams", retry_after=10)
        stream = service.live.follow(service.state)
        return StreamingResponse(
            stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    @router.get("/metrics", response_class=Response, responses=_METRICS)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/health")
    async def health() -> Status:
        """Whether it lives; also while it drains."""
        return _status(service, service.status != "stopped")

    @router.get("/ready")
    async def ready() -> Status:
        """Whether it takes requests."""
        return _status(service, service.status == "ok")

    return router


_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
_METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}


def _status(service: Service, well: bool) -> Status:
    if not well:
        raise ApiError(503, f"The service is {service.status}.", service.status, retry_after=10)
    return Status(status=service.status)


def _page() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = resources.files(__package__) / "page"
    for path, (name, kind) in _PAGE.items():
        router.add_api_route(path, _giver((files / name).read_bytes(), kind), methods=["GET"])
    return router


def _giver(content: bytes, kind: str) -> Callable[[], Any]:
    # Read once, when the app is made: no file is opened on a client's word.
    async def give() -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8", headers={"Cache-Control": "no-cache"})

    return give

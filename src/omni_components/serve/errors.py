"""What a client is told when it does not get what it asked for: OpenAI's shape, and never a traceback."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

_MOST_TEXT = 500  # characters of a message: some repeat what the client sent
CLIENT_GONE = 499  # nobody sees it but the metrics
_REFUSED = "invalid_request_error"
_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}


class ApiError(Exception):
    """An answer other than the one asked for.

    Attributes:
        status: Of HTTP.
        message: For people, one line.
        code: For programs.
        param: The field that is wrong, if one is.
        retry_after: Whole seconds after which it may work.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param, self.retry_after = param, retry_after

    @property
    def kind(self) -> str:
        """OpenAI's ``type``."""
        if self.status == 429:
            return "rate_limit_error"
        return _REFUSED if self.status < 500 else "server_error"

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The answer."""
        told = {**(headers or {})}
        if self.retry_after is not None:
            told["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            told["WWW-Authenticate"] = "Bearer"
        body = {
            "error": {
                "message": _one_line(self.message),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }
        # Escaped: what a client sent may hold what UTF-8 cannot.
        return Response(json.dumps(body), self.status, told, media_type="application/json")


def refused(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the request is wrong, and will be the next time."""
    return ApiError(400, message, code, param=param)


def unexpected() -> ApiError:
    """503: a fault of the service; what it was stays in its log."""
    return ApiError(503, "The service failed on this request. Its log tells why.", "internal_error")


def shutting_down() -> ApiError:
    """503: another copy of the service, or this one started again, will do it."""
    return ApiError(503, "The service is shutting down.", "draining", retry_after=10)


def answer_in_shape(app: FastAPI) -> None:
    """Give the framework's own errors OpenAI's shape too."""
    app.add_exception_handler(ApiError, _of_api)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(RequestValidationError, _of_validation)


async def _of_api(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        text = f"Unknown path: {request.method} {request.url.path}"
        return ApiError(404, text, "unknown_url").response()
    if error.status_code == 405:
        text = f"{request.method} is not possible for {request.url.path}."
        return ApiError(405, text, "method_not_allowed").response(error.headers)
    return ApiError(400, "The body of the request cannot be read.", "invalid_body").response()


async def _of_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return validation_error(error.errors()).response()


def validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's problems in OpenAI's words."""
    first = problems[0]
    kind, where = first["type"], [one for one in first["loc"] if one != "body"]
    if kind == "json_invalid":
        return refused(f"The body of the request is no JSON: {first['ctx']['error']}.", code="invalid_json")
    param = ".".join(str(one) for one in where) or None
    code = _CODES.get(kind, "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value")
    if param is None:
        return refused("The body of the request must be a JSON object.", code=code)
    name = f"'{_one_line(param, 80)}'"
    if kind == "missing":
        return refused(f"Missing required parameter: {name}.", param, code)
    if kind == "extra_forbidden":
        return refused(f"Unknown parameter: {name}.", _one_line(param, 80), code)
    return refused(f"Invalid {name}: {first['msg'][:1].lower()}{first['msg'][1:]}.", param, code)


def _one_line(text: str, most: int = _MOST_TEXT) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "\u2026"

"""Runs an emulator of Google Cloud Storage with the bucket "bucket"; prints its port.

gcp-storage-emulator does not compare generations when it writes or deletes an object, cannot move
objects, and does not send the generation of an object with its content. This program adds these
functions, and faults: POST /faults sets a list of objects with these fields. A request gets the
first fault that matches.

- `match`: regular expression, searched in "METHOD PATH?QUERY NAME"
- `status`: the answer, such as 503
- `lost`: if true, the request is carried out, and only its answer is lost
- `delay`: seconds until the request is carried out; later requests overtake it
- `times`: number of requests, default unlimited

GET /faults returns the number of requests that each of the faults has hit.
"""

import logging
import re
import sys
import threading
import time
from http import HTTPStatus

from gcp_storage_emulator import server
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.storage import Storage

LOCK = threading.Lock()
faults: list[dict] = []


def generation(storage, bucket: str, name: str) -> str:
    return storage.objects.get(bucket, {}).get(name, {}).get("generation", "0")


def name_in(request) -> str:
    """Returns the name of the object that a request is about, or "" if it is about several
    objects.
    """
    data = request.data
    meta = data.get("meta", data) if isinstance(data, dict) else {}
    return (
        (request.params or {}).get("object_id")
        or request.query.get("name", [meta.get("name")])[0]
        or ""
    )


def requires_match(handler):
    """Makes a handler refuse requests whose ifGenerationMatch differs from the generation of the
    object.
    """

    def handle(request, response, storage):
        wanted = request.query.get("ifGenerationMatch")
        if (
            wanted
            and generation(storage, request.params["bucket_name"], name_in(request)) != wanted[0]
        ):
            response.status = HTTPStatus.PRECONDITION_FAILED
        else:
            handler(request, response, storage)

    return handle


def download(request, response, storage):
    objects.download(request, response, storage)
    response["x-goog-generation"] = generation(
        storage, request.params["bucket_name"], request.params["object_id"]
    )


def get(request, response, storage):
    (download if request.query.get("alt") == ["media"] else objects.get)(request, response, storage)


def move(request, response, storage):
    request.params["dest_bucket_name"] = request.params["bucket_name"]
    objects.copy(request, response, storage)
    objects.delete(request, response, storage)


def set_faults(request, response, storage):
    faults[:] = [{"hits": 0, **fault} for fault in request.data or []]


def count_faults(request, response, storage):
    response.json([fault["hits"] for fault in faults])


def with_faults(handler):
    """Makes a handler, which runs alone, refuse, delay or not answer the requests that match a
    fault.
    """

    def handle(request, response, storage):
        text = f"{request.method} {request.path}?{request._parsed_url.query} {name_in(request)}"
        fault = next(
            (
                fault
                for fault in faults
                if fault["hits"] < fault.get("times", float("inf"))
                and re.search(fault["match"], text)
            ),
            {"hits": 0},
        )
        fault["hits"] += 1
        time.sleep(fault.get("delay", 0))
        if "status" not in fault or fault.get("lost"):
            with LOCK:
                handler(request, response, storage)
        if "status" in fault:
            response.status = HTTPStatus(fault["status"])
            response.json({"error": {"code": fault["status"], "message": response.status.phrase}})

    return handle


CHANGED = {
    objects.insert: requires_match(objects.insert),
    objects.delete: requires_match(objects.delete),
    objects.download: download,
    objects.get: get,
}
MOVE = (
    r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.*[^/]+)/moveTo/o/(?P<dest_object_id>.*[^/]+)$",
    {"POST": move},
)
server.HANDLERS = (
    (r"^/faults$", {"POST": set_faults, "GET": count_faults}),
    *(
        (
            path,
            {
                method: with_faults(CHANGED.get(handler, handler))
                for method, handler in handlers.items()
            },
        )
        for path, handlers in (MOVE, *server.HANDLERS)
    ),
)
server.server.HTTPServer = (
    server.server.ThreadingHTTPServer
)  # a delayed request does not delay others
server.server.HTTPServer.request_queue_size = (
    128  # with 5, clients that send several requests at once have to wait
)
Storage._write_config_to_file = lambda self: (
    None
)  # the original writes a list of all objects after every request

if __name__ == "__main__":
    logging.disable()
    emulator = server.create_server("localhost", 0, in_memory=True, default_bucket="bucket")
    emulator.start()
    print(emulator._api._httpd.server_address[1], flush=True)
    sys.stdin.read()  # waits until the tests close the pipe or end
    emulator.stop()

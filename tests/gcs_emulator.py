"""Runs an emulator of Google Cloud Storage with the bucket "bucket"; prints its port.

gcp-storage-emulator does not compare generations when it writes or deletes an object, cannot move objects, and does
not send the generation of an object with its content. This program adds these functions.
"""

import logging
import sys
from http import HTTPStatus

from gcp_storage_emulator import server
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.storage import Storage


def generation(storage, bucket: str, name: str) -> str:
    return storage.objects.get(bucket, {}).get(name, {}).get("generation", "0")


def requires_match(handler):
    """Makes a handler refuse requests whose ifGenerationMatch differs from the generation of the object."""
    def handle(request, response, storage):
        wanted = request.query.get("ifGenerationMatch")
        name = wanted and (request.params.get("object_id") or request.query.get("name", [None])[0]
                           or request.data.get("meta", request.data)["name"])
        if wanted and generation(storage, request.params["bucket_name"], name) != wanted[0]:
            response.status = HTTPStatus.PRECONDITION_FAILED
        else:
            handler(request, response, storage)
    return handle


def download(request, response, storage):
    objects.download(request, response, storage)
    response["x-goog-generation"] = generation(storage, request.params["bucket_name"], request.params["object_id"])


def get(request, response, storage):
    (download if request.query.get("alt") == ["media"] else objects.get)(request, response, storage)


def move(request, response, storage):
    request.params["dest_bucket_name"] = request.params["bucket_name"]
    objects.copy(request, response, storage)
    objects.delete(request, response, storage)


CHANGED = {objects.insert: requires_match(objects.insert), objects.delete: requires_match(objects.delete),
           objects.download: download, objects.get: get}
MOVE = (r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.*[^/]+)/moveTo/o/(?P<dest_object_id>.*[^/]+)$",
        {"POST": move})
server.HANDLERS = (MOVE, *((path, {method: CHANGED.get(handler, handler) for method, handler in handlers.items()})
                           for path, handlers in server.HANDLERS))
server.server.HTTPServer.request_queue_size = 128  # with 5, clients that send several requests at once have to wait
Storage._write_config_to_file = lambda self: None  # the original writes a list of all objects after every request

if __name__ == "__main__":
    logging.disable()
    emulator = server.create_server("localhost", 0, in_memory=True, default_bucket="bucket")
    emulator.start()
    print(emulator._api._httpd.server_address[1], flush=True)
    sys.stdin.read()  # waits until the tests close the pipe or end
    emulator.stop()

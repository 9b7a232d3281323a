"""The connection to BigQuery: options that pickle, clients that every process makes once, and what their errors mean.

Messages of BigQuery can contain values of cells, so errors name the code and reason only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import requests
from google.api_core import exceptions
from google.api_core.client_options import ClientOptions
from google.auth import exceptions as auth_exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery
from google.cloud.bigquery_storage_v1 import BigQueryReadClient, BigQueryWriteClient
from google.cloud.bigquery_storage_v1.services.big_query_read.transports import BigQueryReadGrpcTransport
from google.cloud.bigquery_storage_v1.services.big_query_write.transports import BigQueryWriteGrpcTransport
from google.oauth2 import service_account

from penstock.destinations.refusals import out_of_reach, rejected, unusable
from penstock.errors import RESYNC, PenstockError

BUSY = frozenset({"quotaExceeded", "rateLimitExceeded", "backendError", "internalError", "jobRateLimitExceeded"})
"""Reasons of refusals that time heals, whatever their status is."""
AWAY = (
    exceptions.ServerError,
    exceptions.TooManyRequests,
    exceptions.Aborted,
    exceptions.Cancelled,
    exceptions.RetryError,
    auth_exceptions.TransportError,
    requests.exceptions.ConnectionError,
    requests.exceptions.Timeout,
    grpc.RpcError,
    ConnectionError,
    TimeoutError,
)
_DENIED = (exceptions.Unauthorized, exceptions.Forbidden, auth_exceptions.GoogleAuthError)
_MESSAGE_BYTES = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True, slots=True)
class Connection:
    """Where BigQuery is and who we are there; pickles."""

    project: str
    dataset: str
    location: str | None = None
    credentials: str | None = field(default=None, repr=False)
    """The JSON of a service account; None for the default credentials of each machine."""
    endpoint: str | None = None
    """The URL of an emulator; without credentials."""
    storage_endpoint: str | None = None
    """Host and port of an emulator's gRPC."""

    def path(self, table: str) -> str:
        """Return the name of a table for the Storage API."""
        return f"projects/{self.project}/datasets/{self.dataset}/tables/{table}"

    def reference(self, table: str) -> str:
        """Return the name of a table for the REST API."""
        return f"{self.project}.{self.dataset}.{table}"

    def quoted(self, table: str) -> str:
        """Return the name of a table for SQL."""
        return f"`{self.reference(table)}`"

    @property
    def client(self) -> bigquery.Client:
        """The client for tables and jobs."""
        return _client(self)

    @property
    def write_client(self) -> BigQueryWriteClient:
        """The client for appending rows."""
        return _write_client(self)

    @property
    def read_client(self) -> BigQueryReadClient:
        """The client for reading rows."""
        return _read_client(self)

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """Run a statement and return its rows."""
        config = bigquery.QueryJobConfig(query_parameters=list(parameters))
        return self.client.query(sql, job_config=config, location=self.location).result()


def connect(
    project: str,
    dataset: str,
    location: str | None,
    credentials_file: str | None,
    endpoint: str | None,
    storage_endpoint: str | None,
) -> Connection:
    """Return a connection; read the file of credentials here, because tasks may run on machines without it."""
    secret = None
    if credentials_file is not None:
        try:
            secret = Path(credentials_file).expanduser().read_text()
        except OSError as error:
            raise unusable(
                f"{credentials_file} (credentials_file) cannot be read: {error.strerror}",
                hint="Name the JSON key of a service account, or leave credentials_file out to use the default "
                "credentials of the machine.",
            ) from None
    if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
        raise unusable("the endpoint of a bigquery destination must start with http:// or https://")
    if (endpoint is None) != (storage_endpoint is None):
        raise unusable("endpoint and storage_endpoint go together: both are addresses of an emulator")
    return Connection(project, dataset, location, secret, endpoint, storage_endpoint)


def failure(table: str, error: Exception) -> Exception:
    """Return what an error of a client means; an error that is not of a client as it is."""
    if isinstance(error, PenstockError):
        return error
    reason = _reason(error)
    if isinstance(error, AWAY) or reason in BUSY:
        return out_of_reach("BigQuery", reason or type(error).__name__)
    if isinstance(error, _DENIED):
        return unusable(
            f"BigQuery refuses access ({reason or type(error).__name__})",
            hint="Check credentials_file, or run: gcloud auth application-default login. The account needs the roles "
            "BigQuery Data Editor on the dataset and BigQuery Job User on the project.",
        )
    if isinstance(error, exceptions.NotFound):
        return rejected(
            table, "BigQuery has no such table", hint=f"If it was deleted there, copy the table again: {RESYNC}."
        )
    if isinstance(error, exceptions.GoogleAPICallError):
        return rejected(table, f"BigQuery refused a request ({reason or type(error).__name__})")
    return error


@contextmanager
def translated(table: str) -> Iterator[None]:
    """Within the block, errors of clients become errors of Penstock."""
    try:
        yield
    except Exception as error:
        meaning = failure(table, error)
        if meaning is error:
            raise
        raise meaning from None


def _reason(error: Exception) -> str:
    """Return the reason of a refusal, a word such as `quotaExceeded`; empty if there is none."""
    if not isinstance(error, exceptions.GoogleAPICallError):
        return ""
    found = [each.get("reason", "") for each in error.errors if isinstance(each, Mapping)]
    status = error.grpc_status_code
    return str(found[0]) if found else "" if status is None else str(status.name)


@lru_cache(maxsize=8)
def _credentials(connection: Connection) -> Any:
    if connection.endpoint is not None:
        return AnonymousCredentials()
    if connection.credentials is None:
        return None
    try:
        return service_account.Credentials.from_service_account_info(json.loads(connection.credentials))
    except (ValueError, KeyError):
        raise unusable("credentials_file is not the JSON key of a service account") from None


@lru_cache(maxsize=8)
def _client(connection: Connection) -> bigquery.Client:
    options = None if connection.endpoint is None else ClientOptions(api_endpoint=connection.endpoint)
    with translated("the dataset"):
        return bigquery.Client(
            connection.project,
            credentials=_credentials(connection),
            location=connection.location,
            client_options=options,
        )


@lru_cache(maxsize=8)
def _write_client(connection: Connection) -> BigQueryWriteClient:
    with translated("the dataset"):
        if connection.storage_endpoint is None:
            return BigQueryWriteClient(credentials=_credentials(connection))
        channel = grpc.insecure_channel(connection.storage_endpoint, _MESSAGE_BYTES)
        return BigQueryWriteClient(transport=BigQueryWriteGrpcTransport(channel=channel))


@lru_cache(maxsize=8)
def _read_client(connection: Connection) -> BigQueryReadClient:
    with translated("the dataset"):
        if connection.storage_endpoint is None:
            return BigQueryReadClient(credentials=_credentials(connection))
        channel = grpc.insecure_channel(connection.storage_endpoint, _MESSAGE_BYTES)
        return BigQueryReadClient(transport=BigQueryReadGrpcTransport(channel=channel))

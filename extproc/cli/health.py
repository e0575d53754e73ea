"""`warmroute health`: ask a running Warmroute whether it is alive or ready. For container health checks."""

import argparse
import http.client
import sys

import grpc

from extproc import config as configuration
from extproc.core.errors import WarmrouteError
from extproc.pb import health_pb2
from extproc.protocol.addresses import Address, parse_address
from extproc.protocol.endpoint_picker import HEALTH_SERVICE

HELP = "ask a running Warmroute whether it is ready, or alive (exit code 0: yes, 1: no, or no answer)"

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_STATUS = health_pb2.HealthCheckResponse.ServingStatus


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-c", "--config", metavar="FILE", help="ask where this configuration listens")
    where.add_argument("--address", metavar="HOST:PORT", default="127.0.0.1:50051", help="ask here")
    parser.add_argument(
        "--service",
        choices=("readiness", "liveness"),
        default="readiness",
        help="readiness: there is a worker to send requests to; liveness: it answers",
    )
    parser.add_argument("--timeout", type=float, default=2.0, metavar="SECONDS", help="longest wait")


def run(args: argparse.Namespace) -> int:
    """Ask once, and print the answer. Nobody there is an answer, too: exit code 1.

    Raises:
        WarmrouteError: there is no address to ask.
    """
    config = None if args.config is None else configuration.load(args.config)
    if config is not None and config.tls is not None:
        return _ask_admin(config.admin.listen, args.service, args.timeout)
    address = parse_address(args.address if config is None else config.listen)
    address = address._replace(host=_ANY_HOST.get(address.host, address.host))
    with grpc.insecure_channel(str(address)) as channel:
        check = channel.unary_unary(
            f"/{HEALTH_SERVICE}/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(health_pb2.HealthCheckRequest(service=args.service), timeout=args.timeout)
        except grpc.RpcError as error:
            return _no_answer(
                args.service, address, error.details() if isinstance(error, grpc.Call) else error
            )
    print(f"{args.service}: {_STATUS.Name(answer.status)}")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


def _no_answer(service: str, address: Address, why: object) -> int:
    print(f"{service}: no answer from {address}: {why}", file=sys.stderr)
    return 1


def _ask_admin(listen: str, service: str, timeout: float) -> int:
    """With TLS, gRPC may want a certificate that we do not have; the admin server asks for nothing."""
    if not listen:
        raise WarmrouteError("with `tls`, health is asked of the admin server: set `admin.listen`")
    address = parse_address(listen)
    address = address._replace(host=_ANY_HOST.get(address.host, address.host))
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)
    try:
        connection.request("GET", "/livez" if service == "liveness" else "/readyz")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return _no_answer(service, address, error)
    finally:
        connection.close()
    serving = status == http.HTTPStatus.OK
    print(f"{service}: {'SERVING' if serving else 'NOT_SERVING'}")
    return 0 if serving else 1

# SPDX-License-Identifier: Apache-2.0
"""Application for Ray Serve: a front over several engines, with settings for both.

`build` makes it from a config file of `serve deploy`:

    applications:
      - name: radixkv
        route_prefix: /
        import_path: radixkv_server.ray_serve.application:build
        args: {model: smollm2-135m-instruct, replicas: 2, num_blocks: 2000}
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from radixkv.engine.config import EMBEDDED_MODEL, EngineConfig
from radixkv.engine.policy_names import check_policies
from radixkv.errors import ConfigError
from radixkv_server.app import with_tenants
from radixkv_server.ray_serve.autoscaling import queue_policy
from radixkv_server.ray_serve.directory import ReplicaDirectory
from radixkv_server.ray_serve.front import Front, made_app
from radixkv_server.ray_serve.replica import AutoscaledReplica, EngineReplica
from radixkv_server.ray_serve.settings import ReplicaSettings
from radixkv_server.settings import ServerSettings, make_settings

#: Names of the two deployments.
FRONT, ENGINE = "front", "engine"
# Ray Serve's own limits of concurrent requests (5 by default): the engine's queue is the one that counts.
_MAX_ONGOING = 100_000
# Seconds between two looks at a replica's health (10 by default), and that an answer may take.
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 1.0, 5.0
# Seconds between two reports for the autoscaler (10 by default).
_REPORT_S = 1.0
# Seconds that a replica has beyond the grace of its requests, to write its saves.
_CLOSING_S = 15.0


def application(config: EngineConfig, settings: ServerSettings, replicas: ReplicaSettings) -> Application:
    """Make the application for `serve.run`.

    Raises:
        ConfigError: see `with_tenants`; or there is no policy of a name.
    """
    check_policies(config)  # here, not in a replica that would be started again and again
    number = replicas.replicas or 1
    config = with_tenants(config, settings)
    autoscaling = None
    if replicas.max_replicas is not None and replicas.max_replicas > number:
        autoscaling = _autoscaling(replicas, number)
    engine = serve.deployment(
        EngineReplica if autoscaling is None else AutoscaledReplica,
        name=ENGINE,
        **({"num_replicas": number} if autoscaling is None else {"autoscaling_config": autoscaling}),
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=settings.shutdown_grace_s + _CLOSING_S,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(
            request_router_class=ReplicaDirectory, request_routing_stats_period_s=_REPORT_S
        ),
        ray_actor_options={
            "num_cpus": 1 if replicas.replica_cpus is None else replicas.replica_cpus,
            "num_gpus": replicas.replica_gpus or 0,
            "runtime_env": {
                "env_vars": {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": str(_REPORT_S)}
            },
        },
    )
    front = serve.deployment(
        serve.ingress(made_app)(Front),
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=settings.shutdown_grace_s + _CLOSING_S,
        health_check_period_s=_HEALTH_PERIOD_S,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(engine.bind(config), settings)


def _autoscaling(replicas: ReplicaSettings, number: int) -> AutoscalingConfig:
    with warnings.catch_warnings():
        # Later versions take the interval from the replicas' environment, which says the same.
        warnings.filterwarnings("ignore", message=".*metrics_interval_s.*", category=DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=number,
            initial_replicas=number,
            max_replicas=replicas.max_replicas,
            metrics_interval_s=_REPORT_S,
            look_back_period_s=5 * _REPORT_S,
            # The policy gets nothing else: its target of the queue is given in these two.
            target_ongoing_requests=replicas.target_queue_s,
            downscale_delay_s=replicas.scale_down_after_s,
            policy=AutoscalingPolicy(policy_function=queue_policy),
        )


def build(args: Mapping[str, Any]) -> Application:
    """Make the application from `args` in a config file: settings by the flags' names, with underscores.

    Raises:
        ConfigError: an unknown name, or a value out of range.
    """
    rest = {name.replace("-", "_"): value for name, value in args.items()}
    engine = {item.name for item in fields(EngineConfig)} - {"model"}
    server = {item.name for item in fields(ServerSettings)} | {"api_key_file"}
    replicas = {item.name for item in fields(ReplicaSettings)} - {"ray_address"}
    unknown = sorted(set(rest) - engine - server - replicas - {"model"})
    if unknown:
        known = ", ".join(sorted(engine | server | replicas))
        raise ConfigError(f"args: {', '.join(unknown)} is not known; known are model, {known}")

    def of(names: set[str]) -> dict[str, Any]:
        return {name: rest[name] for name in names & set(rest)}

    config = EngineConfig.from_options(rest.get("model", EMBEDDED_MODEL), of(engine))
    return application(
        config, make_settings(**of(server)), ReplicaSettings(**{"replicas": 1, **of(replicas)})
    )


def placed(
    config: EngineConfig, replicas: ReplicaSettings, cpus: float, gpus: float
) -> tuple[EngineConfig, ReplicaSettings]:
    """Fill in the open settings for a cluster: each replica's share of its CPUs and GPUs.

    Args:
        cpus, gpus: of the cluster.
    """
    number = replicas.max_replicas or replicas.replicas or 1
    uses_gpu = config.device != "cpu" and gpus > 0
    replica_gpus = (1.0 if uses_gpu else 0.0) if replicas.replica_gpus is None else replicas.replica_gpus
    replica_cpus = replicas.replica_cpus
    if replica_cpus is None:
        replica_cpus = 1.0 if replica_gpus else max(1.0, cpus // number)
    if config.threads is None and not replica_gpus:
        config = replace(config, threads=max(1, int(replica_cpus)))
    return config, replace(replicas, replica_cpus=replica_cpus, replica_gpus=replica_gpus)

"""KubeRay's part of its custom resources: the fields that deploy/kuberay uses, as JSON Schema.

Their names, types, values, and which are required are those of its API reference (docs.ray.io, "KubeRay CRD API
reference"). Those of a RayCluster were compared by hand with the types that its definitions are generated from
(ray-project/kuberay, ray-operator/apis/ray/v1/raycluster_types.go, in the version that has `tlsOptions`). The generated
definitions repeat Kubernetes' pods in each group and have almost a megabyte. Here a pod is any object; the tests check
it as the PodTemplate that it is. An unknown field is an error: the API server would drop it without a word.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def fields(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """An object of these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
ANY: Schema = {"type": "object"}

GROUP: dict[str, Schema] = {"rayStartParams": TEXTS, "template": ANY}

CLUSTER_SPEC = fields(
    ("headGroupSpec",),
    rayVersion=TEXT,
    authOptions=fields(mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=fields(
        version={"enum": ["v1", "v2"]},
        idleTimeoutSeconds=COUNT,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        resources=ANY,
    ),
    gcsFaultToleranceOptions=fields(redisAddress=TEXT, redisPassword=fields(valueFrom=ANY)),
    headGroupSpec=fields(("template",), **GROUP),
    workerGroupSpecs={
        "type": "array",
        "items": fields(
            ("groupName", "maxReplicas", "minReplicas", "template"),
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            idleTimeoutSeconds=COUNT,
            **GROUP,
        ),
    },
)

JOB_SPEC = fields(
    ("clusterSelector", "entrypoint"),
    clusterSelector=TEXTS,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    entrypoint=TEXT,
)


def resource(kind: str, spec: Schema) -> Schema:
    """A whole resource of KubeRay's."""
    return fields(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "ray.io/v1"},
        kind={"const": kind},
        metadata=ANY,
        spec=spec,
    )


SCHEMAS = {"RayCluster": resource("RayCluster", CLUSTER_SPEC), "RayJob": resource("RayJob", JOB_SPEC)}

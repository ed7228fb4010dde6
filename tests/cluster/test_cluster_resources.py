"""Custom resources on a real API server: schema, status apart from spec, watch, conflicts. Runs on every provider."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException

from .cluster import Cluster, eventually

GROUP = "tests.occamy.dev"


@pytest.fixture(scope="module")
def toys(cluster: Cluster) -> Iterator[str]:
    """Plural of a fresh custom resource with a defaulted and a bounded field and a status of its own."""
    plural = f"toys{secrets.token_hex(3)}"
    size = {"type": "integer", "minimum": 1, "maximum": 5, "default": 2}
    spec = {"type": "object", "required": ["colour"], "properties": {"colour": {"type": "string"}, "size": size}}
    status = {"type": "object", "properties": {"phase": {"type": "string"}}}
    schema = {"type": "object", "properties": {"spec": spec, "status": status}}
    version = {"name": "v1", "served": True, "storage": True, "subresources": {"status": {}}}
    names = {"plural": plural, "singular": plural[:-1], "kind": plural.capitalize()}
    api = client.ApiextensionsV1Api(cluster.client())
    api.create_custom_resource_definition(
        {
            "metadata": {"name": f"{plural}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "scope": "Namespaced",
                "names": names,
                "versions": [version | {"schema": {"openAPIV3Schema": schema}}],
            },
        }
    )

    def established() -> bool:
        conditions = api.read_custom_resource_definition(f"{plural}.{GROUP}").status.conditions or []
        return any(c.type == "Established" and c.status == "True" for c in conditions)

    eventually(established)
    yield plural
    api.delete_custom_resource_definition(f"{plural}.{GROUP}")


def toy(plural: str, name: str, **spec: object) -> dict[str, object]:
    return {"apiVersion": f"{GROUP}/v1", "kind": plural.capitalize(), "metadata": {"name": name}, "spec": spec}


def test_defaults_are_filled_in_and_bad_values_refused(cluster: Cluster, namespace: str, toys: str) -> None:
    api = client.CustomObjectsApi(cluster.client())
    where = (GROUP, "v1", namespace, toys)
    made = api.create_namespaced_custom_object(*where, toy(toys, "a", colour="red", unknown=1))
    assert made["spec"] == {"colour": "red", "size": 2}
    for bad in ({"colour": "red", "size": 6}, {"size": 1}, {"colour": 3}):
        with pytest.raises(ApiException) as problem:
            api.create_namespaced_custom_object(*where, toy(toys, "b", **bad))
        assert problem.value.status == 422
    assert [item["metadata"]["name"] for item in api.list_namespaced_custom_object(*where)["items"]] == ["a"]


def test_status_is_written_through_its_own_address_only(cluster: Cluster, namespace: str, toys: str) -> None:
    api = client.CustomObjectsApi(cluster.client())
    where = (GROUP, "v1", namespace, toys)
    api.create_namespaced_custom_object(*where, toy(toys, "a", colour="red"))
    assert "status" not in api.patch_namespaced_custom_object(*where, "a", {"status": {"phase": "Bound"}})
    patched = api.patch_namespaced_custom_object_status(
        *where, "a", {"status": {"phase": "Bound"}, "spec": {"size": 5}}
    )
    assert (patched["status"], patched["spec"]["size"]) == ({"phase": "Bound"}, 2)


def test_of_two_writers_with_the_same_version_one_gets_a_conflict(cluster: Cluster, namespace: str, toys: str) -> None:
    api = client.CustomObjectsApi(cluster.client())
    where = (GROUP, "v1", namespace, toys)
    api.create_namespaced_custom_object(*where, toy(toys, "a", colour="red"))
    first, second = (api.get_namespaced_custom_object(*where, "a") for _ in range(2))
    first["spec"]["colour"], second["spec"]["colour"] = "green", "blue"
    api.replace_namespaced_custom_object(*where, "a", first)
    with pytest.raises(ApiException) as problem:
        api.replace_namespaced_custom_object(*where, "a", second)
    assert problem.value.status == 409
    assert api.get_namespaced_custom_object(*where, "a")["spec"]["colour"] == "green"


def test_a_watch_sees_every_change_in_order(cluster: Cluster, namespace: str, toys: str) -> None:
    api = client.CustomObjectsApi(cluster.client())
    where = (GROUP, "v1", namespace, toys)
    start = api.list_namespaced_custom_object(*where)["metadata"]["resourceVersion"]
    api.create_namespaced_custom_object(*where, toy(toys, "a", colour="red"))
    api.patch_namespaced_custom_object(*where, "a", {"spec": {"size": 3}})
    api.delete_namespaced_custom_object(*where, "a")
    stream = watch.Watch().stream(
        api.list_namespaced_custom_object, *where, resource_version=start, timeout_seconds=180, _request_timeout=200
    )
    seen = []
    for event in stream:
        seen.append((event["type"], event["object"]["spec"]["size"]))
        if len(seen) == 3:
            break
    assert seen == [("ADDED", 2), ("MODIFIED", 3), ("DELETED", 3)]

"""Manifests that the tests start from."""

from __future__ import annotations

import copy
from typing import Any

from dlrover.kubernetes.api.client import Resource

Manifest = dict[str, Any]

CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")

CONTAINER = {"name": "main", "image": "train:1", "command": ["dlrover-run", "train.py"]}


def job(**spec: Any) -> Manifest:
    """The smallest manifest, with more in its spec; as the API server gives it."""
    worker = {"replicas": 2, "template": {"spec": {"containers": [copy.deepcopy(CONTAINER)]}}}
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "digits", "namespace": "default", "uid": "uid-1", "generation": 1},
        "spec": {"replicaSpecs": {"worker": worker}, **spec},
    }


SEED = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata:
  name: torch-mnist-single-job-testing-1
  namespace: dlrover
  labels:
    some-label: some-value
spec:
  distributionStrategy: AllreduceStrategy
  optimizeMode: cluster
  replicaSpecs:
    worker:
      replicas: 5
      template:
        spec:
          restartPolicy: Always
          containers:
            - name: main
              image: example.com/dlrover:pytorch-example
              imagePullPolicy: Always
              command:
                - /bin/bash
                - -c
                - "dlrover-run --network-check --nnodes=1:10 --nproc_per_node=1 --max_restarts=10 train.py"
              resources:
                limits:
                  cpu: 2
                  memory: 3Gi
                  tencent.com/vcuda-core: 100
                requests:
                  cpu: 2
                  memory: 3Gi
                  tencent.com/vcuda-core: 100
"""

EARLY_SEED = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata:
  name: dist-iris
spec:
  distributionStrategy: ParameterServerStrategy
  replicaSpecs:
    PS:
      template:
        spec:
          containers:
            - name: main
              image: tf-estimator:iris
              command:
                - "python -m model_zoo.tf_estimator.iris_dnn_elastic"
    Worker:
      template:
        spec:
          containers:
            - name: main
              image: tf-estimator:iris
              command:
                - "python -m model_zoo.tf_estimator.iris_dnn_elastic"
"""

ORIGINAL = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata:
  name: deepctr-auto-scaling-job
  namespace: dlrover
spec:
  distributionStrategy: ParameterServerStrategy
  optimizeMode: single-job
  enableElasticScheduling: true
  enableDynamicSharding: true
  resourceLimits:
    cpu: "15"
    memory: "10000Mi"
    gpu: 4
  envs:
    first:
      name: LOG_LEVEL
      value: debug
  replicaSpecs:
    ps:
      autoScale: False
      replicas: 1
      restartCount: 3
      priority: "0.5"
      restartTimeout: 600
      template:
        metadata:
          annotations:
            sidecar.istio.io/inject: "false"
        spec:
          restartPolicy: Never
          containers:
            - name: main
              image: example.com/deeprec:v11
              volumeMounts:
                - name: pvc-nas
                  mountPath: /nas
          volumes:
            - name: pvc-nas
              persistentVolumeClaim:
                claimName: pvc-nas
    worker:
      replicas: 0
      template:
        spec:
          containers:
            - name: main
              image: example.com/deeprec:v11
    dlrover-master:
      template:
        spec:
          restartPolicy: Never
          containers:
            - name: main
              imagePullPolicy: Always
"""

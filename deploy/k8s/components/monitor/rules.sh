#!/usr/bin/env bash
# The alerts of deploy/monitoring/rules.yaml as an object of the Prometheus operator, on standard output.
#
# usage: deploy/k8s/components/monitor/rules.sh | kubectl apply -n tandem -f -
set -euo pipefail
cat <<'YAML'
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: tandem
  labels:
    app.kubernetes.io/name: tandem
    app.kubernetes.io/part-of: tandem
spec:
YAML
sed '/^#/d; s/^./  &/' "$(dirname "${BASH_SOURCE[0]}")/../../../monitoring/rules.yaml"

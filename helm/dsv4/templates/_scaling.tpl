{{- define "dsv4.scaleTarget" -}}
{{- if gt (int .Values.multiNode.nodes) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "dsv4.fullname" . | quote }}
{{- end -}}

{{/* Up one pod at a time, because each takes minutes to load and the next decision should see it; down slowly. */}}
{{- define "dsv4.scaleBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 60
  policies:
    - type: Pods
      value: 1
      periodSeconds: 300
scaleDown:
  stabilizationWindowSeconds: {{ int .Values.autoscaling.scaleDownAfterSeconds }}
  policies:
    - type: Pods
      value: 1
      periodSeconds: 600
{{- end -}}

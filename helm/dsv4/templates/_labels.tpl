{{/* Labels and annotations. Selectors never change over a release's life, so no value is in them; everything else may. */}}

{{- define "dsv4.selectorLabels" -}}
{{- include "dsv4.selectorOf" (dict "root" . "component" "server") -}}
{{- end -}}

{{/* The same for another part. Call with (dict "root" $ "component" "download"). */}}
{{- define "dsv4.selectorOf" -}}
app.kubernetes.io/name: {{ .root.Chart.Name | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* The chart's own labels win over the operator's. Call with (dict "root" $ "component" "download" "labels" (dict)). */}}
{{- define "dsv4.labels" -}}
{{- $own := dict
  "helm.sh/chart" (include "dsv4.chart" .root)
  "app.kubernetes.io/name" .root.Chart.Name
  "app.kubernetes.io/instance" .root.Release.Name
  "app.kubernetes.io/version" (.root.Chart.AppVersion | toString)
  "app.kubernetes.io/managed-by" .root.Release.Service
  "app.kubernetes.io/component" (default "server" .component) -}}
{{- toYaml (merge $own (default (dict) .labels) (deepCopy .root.Values.commonLabels)) -}}
{{- end -}}

{{/* Name, namespace, labels and annotations of an object. Call with
     (dict "root" $ "name" "x" "component" "server" "labels" (dict) "annotations" (dict)); all but root and name may be left out. */}}
{{- define "dsv4.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "dsv4.labels" . | nindent 2 }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

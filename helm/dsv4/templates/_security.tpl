{{/* Security of pods and containers: non-root, no capability, read-only root, seccomp on. */}}

{{- define "dsv4.podSecurityContext" -}}
{{- $security := .Values.podSecurity -}}
runAsNonRoot: true
runAsUser: {{ $security.runAsUser | int64 }}
runAsGroup: {{ $security.runAsGroup | int64 }}
fsGroup: {{ $security.runAsGroup | int64 }}
# Setting the owner of a terabyte at every start would take minutes; once is enough.
fsGroupChangePolicy: OnRootMismatch
{{- if ne .Values.gpu.product "none" }}
{{- with $security.supplementalGroups }}
supplementalGroups: [{{ range $index, $gid := . }}{{ if $index }}, {{ end }}{{ $gid | int64 }}{{ end }}]
{{- end }}
{{- end }}
seccompProfile:
  type: {{ $security.seccompProfile }}
  {{- if eq $security.seccompProfile "Localhost" }}
  localhostProfile: {{ $security.seccompLocalhostProfile | quote }}
  {{- end }}
{{- end -}}

{{/* Call with (dict "root" $ "lockMemory" true). */}}
{{- define "dsv4.securityContext" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: {{ .root.Values.podSecurity.readOnlyRootFilesystem }}
runAsNonRoot: true
capabilities:
  drop: [ALL]
  {{- if .lockMemory }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

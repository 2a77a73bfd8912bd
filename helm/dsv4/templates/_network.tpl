{{- define "dsv4.dnsEgress" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- end -}}

{{/* The hub, or the mirror: its port, wherever its address points. Policies know no names. */}}
{{- define "dsv4.hubEgress" -}}
{{- $endpoint := default "https://huggingface.co" .Values.model.download.endpoint -}}
{{- $port := regexFind ":[0-9]+" (regexReplaceAll "^https?://" $endpoint "" | splitList "/" | first) | trimPrefix ":" -}}
- ports:
    - port: {{ default (ternary "443" "80" (hasPrefix "https:" $endpoint)) $port }}
      protocol: TCP
{{- end -}}

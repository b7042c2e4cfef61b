{{- define "dlrover.labels" -}}
app.kubernetes.io/name: dlrover-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dlrover.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "dlrover.name" -}}
{{ .Release.Name | trunc 46 }}-dlrover-operator
{{- end }}

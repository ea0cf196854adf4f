{{- define "timeball.name" -}}
{{- if contains "timeball" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-timeball{{ end }}
{{- end }}

{{- define "timeball.selector" -}}
app.kubernetes.io/name: timeball
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "timeball.labels" -}}
{{ include "timeball.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "timeball.scheme" -}}
{{ if .Values.tls.secretName }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

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

{{- define "timeball.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Labels of pods that serve no client: the services and the disruption budget must not find them. Takes the chart's context and a component. */}}
{{- define "timeball.part" -}}
app.kubernetes.io/name: timeball-{{ .component }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "timeball.partLabels" -}}
{{ include "timeball.part" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- /* What every pod of the chart has: no right of its own, and no variable that Kubernetes adds. */}}
{{- define "timeball.pod" -}}
automountServiceAccountToken: false
# A service named timeball would give its pods TIMEBALL_PORT=tcp://…, which is the variable of --port.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 7400
  runAsGroup: 7400
  fsGroup: 7400
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "timeball.container" -}}
image: {{ include "timeball.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}

{{- /* Timeball refuses secrets that others than their owner may read, and fsGroup makes every secret readable by the group: so
a container copies them first. Takes the chart's context and a list of name, file and folder. */}}
{{- define "timeball.copies" -}}
{{- $root := .root }}
{{- range .secrets }}
- name: {{ .name }}
  {{- include "timeball.container" $root | nindent 2 }}
  command: [install, -m, "0600", /secret/{{ .file }}, {{ .folder }}/{{ .file }}]
  volumeMounts:
    - { name: {{ .name }}-secret, mountPath: /secret, readOnly: true }
    - { name: {{ .name }}, mountPath: {{ .folder }} }
{{- end }}
{{- end }}

{{- define "timeball.copiesMounts" -}}
{{- range .secrets }}
- { name: {{ .name }}, mountPath: {{ .folder }}, readOnly: true }
{{- end }}
{{- end }}

{{- define "timeball.copiesVolumes" -}}
{{- range .secrets }}
- name: {{ .name }}-secret
  secret: { secretName: {{ .secret }}, defaultMode: 0440 }
- name: {{ .name }}
  emptyDir: { medium: Memory }
{{- end }}
{{- end }}

{{- /* Settings, and the files that they name for the way to etcd. */}}
{{- define "timeball.settingsMounts" -}}
- { name: settings, mountPath: /etc/timeball/timeball.toml, subPath: timeball.toml, readOnly: true }
{{- if and .Values.cluster.enabled .Values.cluster.etcd.tls.secretName }}
- { name: etcd-tls, mountPath: /etc/timeball/etcd-tls, readOnly: true }
{{- end }}
{{- end }}

{{- define "timeball.settingsVolumes" -}}
- name: settings
  configMap: { name: {{ include "timeball.name" . }} }
{{- if and .Values.cluster.enabled .Values.cluster.etcd.tls.secretName }}
- name: etcd-tls
  secret: { secretName: {{ .Values.cluster.etcd.tls.secretName }}, defaultMode: 0440 }
{{- end }}
{{- end }}

{{- define "timeball.etcdPassword" -}}
name: etcd-password
file: password
folder: /etc/timeball/etcd-password
secret: {{ .Values.cluster.etcd.passwordSecretName }}
{{- end }}

{{- /* The pods of a cluster, with commas between. */}}
{{- define "timeball.nodes" -}}
{{- $name := include "timeball.name" . -}}
{{ $name }}-0,{{ $name }}-1,{{ $name }}-2
{{- end }}

{{- /* The name by which other pods reach a pod of this name. */}}
{{- define "timeball.podDomain" -}}
{{ include "timeball.name" . }}-pods.{{ .Release.Namespace }}.svc
{{- end }}

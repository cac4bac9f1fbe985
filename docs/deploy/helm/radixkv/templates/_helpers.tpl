{{- define "radixkv.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 44 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 44 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 44 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "radixkv.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- /* What tells the servers of this release; with (dict "root" . "component" "server"). */ -}}
{{- define "radixkv.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "radixkv.image" -}}
{{- $suffix := ternary "-gpu" "" .Values.gpu.enabled -}}
{{- printf "%s:%s" .Values.image.repository (default (printf "%s%s" .Chart.AppVersion $suffix) .Values.image.tag) -}}
{{- end -}}

{{- /* Name of server `index` in the cluster's DNS, without the namespace's suffix. */ -}}
{{- define "radixkv.serverName" -}}
{{- $full := include "radixkv.fullname" .root -}}
{{- printf "%s-%d.%s-headless" $full .index $full -}}
{{- end -}}

{{- /* Names in the Host header that servers accept: their own and the Services', short and long. */ -}}
{{- define "radixkv.hosts" -}}
{{- $root := . -}}
{{- $full := include "radixkv.fullname" . -}}
{{- $names := list $full (printf "%s-headless" $full) -}}
{{- if .Values.router.enabled -}}{{- $names = append $names (printf "%s-router" $full) -}}{{- end -}}
{{- range $i := until (int .Values.replicaCount) -}}
{{- $names = append $names (include "radixkv.serverName" (dict "root" $root "index" $i)) -}}
{{- end -}}
{{- $all := list -}}
{{- range $names -}}
{{- $all = concat $all (list . (printf "%s.%s" . $root.Release.Namespace) (printf "%s.%s.svc" . $root.Release.Namespace) (printf "%s.%s.svc.cluster.local" . $root.Release.Namespace)) -}}
{{- end -}}
{{- if and .Values.ingress.enabled .Values.ingress.host -}}{{- $all = append $all .Values.ingress.host -}}{{- end -}}
{{- join "," (concat $all .Values.allowedHosts | uniq) -}}
{{- end -}}

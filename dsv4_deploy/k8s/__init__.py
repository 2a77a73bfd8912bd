"""A deployment on Kubernetes: helm installs it, the API says how it is doing, and every failure gets its cause.

In: values for the chart helm/dsv4 and a kubeconfig. Out: a running release, or a DeployError that names what is
wrong with which pod. helm does the writing; here the cluster is only read. Needs the extra `kubernetes`.
"""

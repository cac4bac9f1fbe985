# SPDX-License-Identifier: Apache-2.0
"""Planning a cluster of replicas: what a trace would meet there, by discrete-event simulation."""

# SPDX-License-Identifier: Apache-2.0
"""The APIs of the server, a folder for each dialect."""

# SPDX-License-Identifier: Apache-2.0
"""The pipeline: agreement on the plan before work starts, and Megatron's schedules with settings that are safe for variable T."""

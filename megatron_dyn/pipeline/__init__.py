# SPDX-License-Identifier: Apache-2.0
"""The pipeline: agreement on the plan before work starts, and Megatron's schedules with messages between stages that follow from the plan."""

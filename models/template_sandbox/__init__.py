"""The sandbox in which chat templates run, with limits on time and memory; see edgeinfer.models.chat_template."""

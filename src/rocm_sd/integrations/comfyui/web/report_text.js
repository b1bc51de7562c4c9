// Shows the text of a report or a benchmark on the node that made it.
import { app } from "../../scripts/app.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const NODES = ["ROCmOptimizationReport", "ROCmBenchmark"];
const NAME = "rocm_sd_text";

function show(node, text) {
  let widget = node.widgets?.find((one) => one.name === NAME);
  if (!widget) {
    widget = ComfyWidgets.STRING(node, NAME, ["STRING", { multiline: true }], app).widget;
    if (widget.inputEl) widget.inputEl.readOnly = true;
    // What was measured is no part of the workflow that is saved or sent.
    widget.serialize = false;
    widget.options = { ...widget.options, serialize: false };
  }
  widget.value = text;
  const [width, height] = node.computeSize();
  node.setSize([Math.max(width, node.size[0], 420), Math.max(height, node.size[1])]);
  app.graph.setDirtyCanvas(true, false);
}

app.registerExtension({
  name: "rocm_sd.report_text",
  async beforeRegisterNodeDef(nodeType, nodeData) {
    if (!NODES.includes(nodeData.name)) return;
    const onExecuted = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.apply(this, arguments);
      if (message?.text) show(this, message.text.join("\n"));
    };
  },
});

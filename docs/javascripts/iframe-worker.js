/* Search in a folder on disk. Browsers start no Worker from file://, so its script runs in a hidden frame there.
   The file's name is what Material's offline plugin looks for before it would load such a script from another host. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      // Of the page's own origin, and so that the worker's answers can be given to its listeners.
      this.frame.srcdoc = "<!doctype html><title>search</title>";
      document.documentElement.append(this.frame);
      this.ready = this.ready.then(() => this.start(new URL(url, location.href).href));
    }

    start(url) {
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      return new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        script.src = url;
        script.addEventListener("load", resolve);
        script.addEventListener("error", () => reject(new Error(`the search cannot load ${url}`)));
        inner.document.head.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}

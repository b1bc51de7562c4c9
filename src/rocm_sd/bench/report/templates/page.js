// Light or dark as the system says, until the reader says otherwise.
{
const root = document.documentElement;
const button = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const shown = () => root.dataset.theme || (dark.matches ? "dark" : "light");
const name = () => { button.setAttribute("aria-pressed", String(shown() === "dark")); };
// A page opened from a folder may be refused storage: then the choice lasts as long as the page does.
try { const kept = localStorage.getItem("rocm-sd-theme"); if (kept === "light" || kept === "dark") root.dataset.theme = kept; } catch (refused) { /* nothing is kept */ }
button.hidden = false;
button.addEventListener("click", () => {
  root.dataset.theme = shown() === "dark" ? "light" : "dark";
  try { localStorage.setItem("rocm-sd-theme", root.dataset.theme); } catch (refused) { /* nothing is kept */ }
  name();
});
dark.addEventListener("change", name);
name();
}

// The API key: asked for when the server wants one, and kept in this tab alone.

const NAME = "rocm-sd.key";
const dialog = document.getElementById("key-dialog");
const field = document.getElementById("key");
const said = document.getElementById("key-said");

let key = null;
let asking = null;

export function knownKey() {
  try {
    return sessionStorage.getItem(NAME) ?? key;
  } catch {
    return key; // A browser that stores nothing has it as long as the page is open.
  }
}

/** Whether there is another one now. Calls that need it at the same time share the question. */
export function askForKey(refused) {
  asking ??= ask(refused).finally(() => {
    asking = null;
  });
  return asking;
}

async function ask(refused) {
  said.textContent = refused ? "The server does not know that key." : "Whoever runs it can give you one.";
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  const given = field.value.trim();
  field.value = "";
  if (dialog.returnValue !== "use" || !given) return false;
  key = given;
  try {
    sessionStorage.setItem(NAME, given);
  } catch {
    // As above.
  }
  return true;
}
